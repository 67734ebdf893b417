"""Models: the families' forward functions, their layers, their configuration and their weights.

Knows arrays and collectives, not requests. A family is one file of `families/` and one line of `registry.py`.
Has met x86-64 Linux (AMD EPYC): `pytest tests/models`. Has not met a GPU: `scripts/gpu_check.sh`.
"""
