"""Families that read images: a tower makes vectors, which stand among the embeddings of a decoder's tokens.

What towers compute belongs to `layers/tower.py`; a file here says what a checkpoint's tensors are and how they are called.
Has met x86-64 Linux (AMD EPYC) and transformers' own logits: `pytest tests/models/families/towers`.
"""
