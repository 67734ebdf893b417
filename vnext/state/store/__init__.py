"""The immutable columns of a state: the rows' matrix, extents, versions, the prefix index; in numpy and in C.

This folder knows no events and no rules: `vnext/state` defines what a field means to a request.
Has met x86-64 Linux (AMD EPYC) with and without the compiled forms: `pytest tests/state/store`. Has not met a
big-endian machine.
"""
