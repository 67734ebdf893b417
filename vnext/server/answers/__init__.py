"""From a call's prompts to its text: generation, readers of its outputs, log-probabilities, tool calls.

Response shapes that only one API uses belong to its view.
Has met x86-64 Linux (AMD EPYC): `pytest tests/server/answers tests/server/views`.
"""
