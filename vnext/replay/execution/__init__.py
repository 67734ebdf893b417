"""Runs the model again on what a log recorded: exec, bisect, and what a log provides for them.

Importing it loads no torch; `replay/rerun` does, when a command runs.
Has met x86-64 Linux (AMD EPYC): `pytest tests/replay/rerun`. Has not met a GPU.
"""
