"""What is true: events, the state that they fold into, and the laws that the state obeys.

The arrays of a state are in `store/`. This folder uses no clock, randomness, file, device or environment; it neither
formats logs nor chooses what to do next.
Has met x86-64 Linux (AMD EPYC): `pytest tests/state tests/sim`.
"""
