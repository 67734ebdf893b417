"""Batches: files of requests on a local disk, answered in the background by this server's own routes.

Holds the store of files and batches, the format of their lines, and the worker. The views of /v1/files and /v1/batches are in
`server/views`; a batch knows no engine and no model.
Has met x86-64 Linux (AMD EPYC): `pytest tests/server/batches`.
"""
