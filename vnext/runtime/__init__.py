"""Effects: every process, channel and device around the pure core, a room for each duty.

Decides nothing: `vnext/sched` plans what is computed next, and `vnext/state` holds what is true.
Has met x86-64 Linux (AMD EPYC): `pytest tests/runtime tests/e2e`. Has not met a GPU: `scripts/gpu_check.sh`.
"""
