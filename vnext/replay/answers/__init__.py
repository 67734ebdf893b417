"""Answers about what happened: statistics, differences, requests' lives, the cache, traces, slices, conversions.

Nothing here is hypothetical; `futures/` has what-if questions.
Has met x86-64 Linux (AMD EPYC): `pytest tests/replay/answers`.
"""
