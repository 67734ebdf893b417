"""Families with latent attention: a token keeps one row for all heads.

How it computes belongs to `layers/latent.py`; a file here says in what else a family differs, and where the checkpoint keeps it.
Has met x86-64 Linux (AMD EPYC) and transformers' own logits: `pytest tests/models/test_families_transformers.py -k deepseek`.
"""
