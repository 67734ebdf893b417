"""What all views share: the server's context, admission, errors, identity, checked requests, metrics.

Contains no routes and no responses: those belong to the views.
Has met x86-64 Linux (AMD EPYC): `pytest tests/server/context`.
"""
