"""The channels between the core and its ranks: events through a ring in shared memory, results back over sockets.

Carries bytes in order; knows no models and no clients. Either end of the ring may be killed at any instruction.
Has met x86-64 Linux (AMD EPYC), compiled and plain: `pytest tests/runtime/transport`. Has met aarch64 only under emulation
(`pytest tests/arm`), which keeps x86's order of memory: the first command on such a machine.
"""
