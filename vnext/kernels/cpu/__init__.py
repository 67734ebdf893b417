"""The CPU kernels: C++ in one compiled module, with Python wrappers that take torch tensors. See docs/cpu.md.

`native` knows whether the module was built, and sets threads and instruction set; `linear`, `attention`, `rows` and
`sampling` are the wrappers. A wrapper checks nothing: the operation's contract checks the arguments.
Has met AVX2, AVX-512 and AVX-512-BF16 (AMD EPYC, Zen 4): `pytest tests/kernels`. Has not met AMX: the same
command. Has met aarch64 only under emulation (`pytest tests/arm`).
"""
