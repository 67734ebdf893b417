"""Measurements: workloads, their figures, and reports that describe the machine.

Uses vnext only as users do; `perf/` measures the parts of an engine.
Has met x86-64 Linux (AMD EPYC): `pytest tests/commands/bench`.
"""
