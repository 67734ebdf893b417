"""One file for each family of models: its config.json, the names of its tensors, its forward function.

Code that families share belongs to `layers/`; a family imports another only if it is a variant of it.
Has met x86-64 Linux (AMD EPYC) and transformers' own logits: `pytest tests/models/test_families_transformers.py`.
"""
