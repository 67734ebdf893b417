"""Logs as tables, for programs, notebooks and other tools: columns, exports, several logs side by side, a report of an incident.

What a log means is answered elsewhere (`answers/`, `causes/`); nothing is counted here that is counted there.
Has met x86-64 Linux (AMD EPYC): `pytest tests/replay/tables`.
"""
