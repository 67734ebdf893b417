"""Sources of tensors: one file a kind of file that checkpoints come in. Each gives tensors by name, as checkpoint.py asks them.

A source knows where bytes lie and how a file names its dtypes; what the bytes mean is for the formats of weights
(kernels/format.py). None keeps what it has read.
Has met x86-64 Linux (AMD EPYC, Zen 4): `pytest tests/models/test_weights.py tests/models/loading`.
"""
