"""What the processes say to each other and get from their users: messages, settings, requests' parameters, log lines.

Values only; sends nothing and starts nothing.
Has met x86-64 Linux (AMD EPYC): `pytest tests/runtime`.
"""
