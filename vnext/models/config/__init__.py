"""A checkpoint's configuration, checked once and in vnext's terms: config.json, rotary settings, the required files.

Uses no tensors and no torch.
Has met x86-64 Linux (AMD EPYC): `pytest tests/models/test_model_config.py`.
"""
