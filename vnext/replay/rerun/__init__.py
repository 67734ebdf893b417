"""Runs a model again on recorded steps. Knows states and tensors, but no log files and no output; decides nothing.

Imported only for questions that states alone cannot answer.
Has met x86-64 Linux (AMD EPYC): `pytest tests/replay/rerun`. Has not met a GPU: `vnext-replay exec LOG` where one is.
"""
