"""`vnext router`: a process in front of independent servers of OpenAI's API, which passes each request on to one of them.

What decides is in vnext/routing, pure. Nothing here reads a model, a token or a log. A stream passes byte by byte.
Has met x86-64 Linux (AMD EPYC), servers on one machine: `pytest tests/gateway`. Has not met servers on several machines.
"""
