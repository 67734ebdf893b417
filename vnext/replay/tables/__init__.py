"""Logs as tables, for programs and people: columns, exports, several logs side by side, a report of an incident, a profile.

What a log means is answered elsewhere (`answers/`, `causes/`); nothing is counted here that is counted there.
Has met x86-64 Linux (AMD EPYC): `pytest tests/replay/tables`.
"""
