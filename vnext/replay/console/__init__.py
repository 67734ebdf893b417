"""What all commands share: exit codes, how an answer is printed, and the line that says how a log ended.

Contains no answers.
Has met x86-64 Linux (AMD EPYC): `pytest tests/replay/test_replay_commands.py`.
"""
