"""The API server: speaks HTTP and SSE with clients and exchanges messages with the engine core.

This folder holds the process, its routes and its settings. Views only translate; nothing here decides what a step computes.
Has met x86-64 Linux (AMD EPYC): `pytest tests/server tests/e2e`.
"""
