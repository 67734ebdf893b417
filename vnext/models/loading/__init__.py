"""Loading, from a name to weights in memory: the hub, the checkpoint's files, one rank's part of each tensor.

Packs and quantizes weights, and computes nothing else with them.
Has met x86-64 Linux (AMD EPYC): `pytest tests/models/test_weights.py tests/models/test_hub.py`.
"""
