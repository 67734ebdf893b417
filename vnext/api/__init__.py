"""The library: `LLM`, `AsyncLLM`, what they return, and a trainer.

Programs import these names from `vnext`. What they pass becomes requests here; engines and clients are of vnext/runtime.
Has met x86-64 Linux (AMD EPYC): `pytest tests/api`.
"""
