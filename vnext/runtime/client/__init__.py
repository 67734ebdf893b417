"""The engine core as an API process or the library sees it: the socket, streams of outputs, silence.

No HTTP and no text: tokens in, tokens out.
Has met x86-64 Linux (AMD EPYC): `pytest tests/runtime/client`.
"""
