"""Operating system facilities: child processes, thread plans, futexes, locks, files that processes share.

No events, no tensors. Everything that depends on the kernel or the processor's architecture is here.
Has met x86-64 Linux (AMD EPYC): `pytest tests/runtime/processes`. Has met aarch64 only under emulation (`pytest tests/arm`),
and no other system: the first command there.
"""
