"""Device operations: references, contracts and the selection table.

A leaf: knows arrays and imports nothing else of vnext.
Has met x86-64 Linux (AMD EPYC): `pytest tests/kernels`. Has not met a GPU: `scripts/gpu_check.sh --only kernels`.
"""
