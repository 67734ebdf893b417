"""All options: the table, the parser, its sources (argv, environment, file), spellings, checks and hints.

Starts nothing and loads no torch. Only `reader.py` reads argv and the environment.
Has met x86-64 Linux (AMD EPYC): `pytest tests/options`.
"""
