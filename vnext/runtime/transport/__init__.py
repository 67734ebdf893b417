"""Channels of an engine's processes in shared memory: the ring from the core to its ranks, and sums over ranks.

Has met x86-64 Linux (AMD EPYC): `pytest tests/runtime/transport`.
"""
