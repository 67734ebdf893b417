"""The GPU's kernels: CUDA sources of `cuda/`, compiled by NVRTC, launched on torch's current stream.

Owns nothing but the room. Importing it needs neither a GPU nor CuPy.
"""
