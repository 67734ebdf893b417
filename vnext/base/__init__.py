"""What every room stands on: compiled modules, installed packages, misspelled names, a tokenizer's files, exit statuses, the version.

Knows nothing of engines, and imports no other room.
Has met x86-64 Linux (AMD EPYC): `pytest tests/base`.
"""
