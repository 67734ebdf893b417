"""Families whose tokens see all of their text: they make vectors and scores, and write nothing.

What such layers compute belongs to `layers/encoder.py`; a file here says what a checkpoint's tensors are and how they are called.
Has met x86-64 Linux (AMD EPYC) and transformers' own states: `pytest tests/models/families/encoders`.
"""
