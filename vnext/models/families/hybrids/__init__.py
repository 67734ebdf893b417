"""Families with layers that keep a state of fixed size beside layers that attend.

What such a layer computes belongs to `layers/recurrent.py`; a file here says which layers are which, and their tensors' names.
Has met x86-64 Linux (AMD EPYC) and transformers' own logits: `pytest tests/models/layers/test_hybrids.py`.
"""
