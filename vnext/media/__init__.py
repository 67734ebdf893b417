"""Media: what a request gives beside its text, from bytes or an address to arrays that a model reads. No model is computed.

Pillow, the extra `images`, is imported when the first image comes. Files here know no requests, no engine and no HTTP server.
Has met x86-64 Linux (AMD EPYC) and transformers' own processors: `pytest tests/media`.
"""
