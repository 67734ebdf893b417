"""The inputs and outputs of a step: the persistent batch, the same batch rebuilt from the state alone, and their hashes.

No model and no device of its own: tensors of rows, tokens and slots.
Has met x86-64 Linux (AMD EPYC): `pytest tests/runtime/batch`.
"""
