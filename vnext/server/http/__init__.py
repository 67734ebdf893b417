"""The HTTP layer: bodies and their fields, compression, connections, origins, middleware, server-sent events.

Knows neither the engine nor generation: the views behind it decide what a call does.
Has met x86-64 Linux (AMD EPYC): `pytest tests/server/http`, `python scripts/fuzz_http.py --seconds 60`.
"""
