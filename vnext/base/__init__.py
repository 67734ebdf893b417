"""What every room stands on: compiled modules, installed packages, names that were misspelled, a tokenizer's files, ends of
processes, the version.

Knows nothing of engines, and imports no other room.
Has met x86-64 Linux (AMD EPYC): `pytest tests/base`.
"""
