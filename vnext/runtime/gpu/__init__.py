"""Steps on a GPU, launched without waiting: the device batch, staging, graphs, and the device behind one interface.

Folds no state and joins no group. Only `cuda.py` and the kernels use CuPy and Numba.
Has not met a GPU, but for a stand-in on the CPU (`pytest tests/runtime/gpu`): `scripts/gpu_check.sh`, `pytest tests/gpu`.
"""
