"""Formats of weights, one file a format: what kernels/format.py asks of each. Its table has a row for each object.

A file here knows its own bits and nothing of checkpoints' files, ranks and kernels. None imports torch: what is loaded for the
CPU's kernels needs none, and what plain torch multiplies by are its tensors.
Has met x86-64 Linux (AMD EPYC, Zen 4): `pytest tests/kernels/test_forms.py`. Has not met a GPU with codes: the same command.
"""
