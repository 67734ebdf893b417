"""What families are made of: layers, the common decoder and its fused forms, the batch, the cache, the sharding table.

No family and no files: a forward gets its parameters and never asks where they came from.
Has met x86-64 Linux (AMD EPYC): `pytest tests/models`. Has not met a GPU: `scripts/gpu_check.sh`.
"""
