"""Operating system facilities: child processes, thread plans, futexes, locks, files that processes share.

No events, no tensors. Everything that depends on the kernel or the processor's architecture is here.
Has met x86-64 Linux (AMD EPYC): `pytest tests/runtime/processes`. Has not met aarch64 or another system: the same command.
"""
