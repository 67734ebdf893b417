"""Measurements of the control plane alone, and of the scheduler on a clock of modelled step times: no model, no ranks, no server.

What needs an engine or a server is one folder up.
Has met x86-64 Linux (AMD EPYC): `pytest tests/commands/bench`.
"""
