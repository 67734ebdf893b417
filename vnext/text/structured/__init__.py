"""Structured output: turns what a client asks of an answer's shape into the text of a grammar that the engine keeps.

Knows neither HTTP nor the engine. Does not mask tokens: ranks do, with the grammar text. A schema is kept whole or refused.
Has met x86-64 Linux (AMD EPYC): `pytest tests/text/structured`.
"""
