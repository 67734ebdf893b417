"""`vnext chat`: a chat in the terminal, with a server or with an engine that it starts.

Uses vnext only as users do.
Has met x86-64 Linux (AMD EPYC): `pytest tests/commands/chat`.
"""
