"""Opens, folds, indexes, verifies and writes logs. Every answer starts here.

Prints nothing and knows no commands.
Has met x86-64 Linux (AMD EPYC): `pytest tests/replay/reading`.
"""
