"""Drafters: what may follow a request's tokens. Drafts follow from tokens and the order of requests, so all ranks draft alike.

May not decide how many drafts a step takes (vnext/state/drafting.py) or which are kept, nor know requests or batches.
Has met x86-64 Linux (AMD EPYC): `pytest tests/sampling/test_drafters.py`.
"""
