"""The engine core: the loop, its process, its clients, and how the ranks are run.

No tensors, and no torch unless the one rank lives in this process.
Has met x86-64 Linux (AMD EPYC): `pytest tests/runtime/engine tests/e2e/test_server_life.py`.
"""
