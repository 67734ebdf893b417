"""What is asked of a simulated run: the numbers of one state, what a run counts and has had, compiled forms beside plain ones.

Drives nothing and draws nothing from a seed: the simulator says when each is asked.
Has met x86-64 Linux (AMD EPYC): `pytest tests/sim`.
"""
