"""A rank: a replica of the state beside one shard of the model; its process, its loading and its runner.

Decides nothing. `runtime/gpu` runs a step on a GPU; `runtime/batch` makes the inputs of a step.
Has met x86-64 Linux (AMD EPYC): `pytest tests/runtime/rank tests/e2e/test_parity.py`. Has not met a GPU: `scripts/gpu_check.sh`.
"""
