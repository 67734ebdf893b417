"""Hosted models: decoders of the installed transformers that no file of families/ computes, run on the parts of layers/.

Their code makes the order of operations; attention, products, embeddings and the cache are this tree's. What would make a row
depend on its batch is replaced here, or refused by name. Attention that other packages have is tried here before it serves. Runs
code of installed packages, never code of a checkpoint.
Has met x86-64 Linux (AMD EPYC): `pytest tests/models/hosted`. Has not met a GPU.
"""
