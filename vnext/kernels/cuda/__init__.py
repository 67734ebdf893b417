"""The GPU's kernels: CUDA sources of `cuda/`, compiled by NVRTC, launched on torch's current stream.

No batches and no models. Importing it needs neither a GPU nor CuPy.
Has met the compiler and a host shim (`pytest tests/cuda`). Has not met a GPU: `scripts/gpu_check.sh --only kernels`.
"""
