"""The decision what to do next: pure functions from a state to a plan.

This folder has no effects and changes no state; `vnext/state/fold_plan.py` defines what a plan does to a state.
Has met x86-64 Linux (AMD EPYC): `pytest tests/sched`.
"""
