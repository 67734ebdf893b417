"""Measurements: workloads, their figures, and reports that describe the machine.

Uses vnext as users do, but for the ranks' sums and what `control/` measures; `perf/` measures other parts of an engine.
Has met x86-64 Linux (AMD EPYC): `pytest tests/commands/bench`.
"""
