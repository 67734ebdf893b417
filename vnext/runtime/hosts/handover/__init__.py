"""How blocks of one engine reach the ranks of another: tickets, shared memory and TCP, behind one contract (source.py).

Does not belong here: which blocks leave or come (vnext/sched, vnext/runtime/engine).
Has met x86-64 Linux (AMD EPYC), one host, two loopback addresses: `pytest tests/runtime/hosts tests/recovery/test_apart.py`.
Has not met two machines, nor GPUs.
"""
