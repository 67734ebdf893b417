"""Families whose MLPs are experts that a router chooses among.

How experts compute and how a router chooses belongs to `layers/`; a file here says which, and where the checkpoint keeps them.
Has met x86-64 Linux (AMD EPYC) and transformers' own logits: `pytest tests/models/test_families_transformers.py`.
"""
