"""Text: turns text into token ids and back, piece by piece. The API server, the library and the bench share it.

Knows neither HTTP nor the engine; of the runtime, it knows only the messages that carry tokens.
Has met x86-64 Linux (AMD EPYC): `pytest tests/text`.
"""
