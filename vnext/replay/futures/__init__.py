"""Hypothetical runs: other futures from a logged state, smaller event lists, other configurations.

Runs no model: the simulator makes up the tokens of other futures.
Has met x86-64 Linux (AMD EPYC): `pytest tests/replay/futures`.
"""
