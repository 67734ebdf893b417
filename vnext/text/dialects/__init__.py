"""Dialects: how each model family writes tool calls and reasoning; a parser and a grammar for each.

`table.py` finds the dialect of a model; `dialect.py` is the interface. Knows no API, no engine and no tokens.
Has met x86-64 Linux (AMD EPYC): `pytest tests/text/dialects`.
"""
