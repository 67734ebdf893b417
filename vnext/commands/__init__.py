"""The commands: `vnext serve`, `vnext chat`, `vnext doctor` and the others, and `vnext-bench`, on top of all rooms.

Nothing imports them but Ray's deployments, which start what a command starts.
Has met x86-64 Linux (AMD EPYC): `pytest tests/commands`.
"""
