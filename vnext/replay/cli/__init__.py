"""The command vnext-replay: declares each command, its options and its exit code.

Contains no answers: each command calls one.
Has met x86-64 Linux (AMD EPYC): `pytest tests/replay/test_replay_commands.py`.
"""
