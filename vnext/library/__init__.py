"""The library's inside: what `LLM` and `AsyncLLM` have in common.

What programs pass becomes requests here. Nothing is sent: engines and their clients belong to vnext/llm.py.
Has met x86-64 Linux (AMD EPYC): `pytest tests/library`.
"""
