"""Facilities: each feature that has events of its own in one file, which folds them and answers what others ask of the feature.

A file here declares in FOLDS what it folds and in `illegal` what its law forbids; table.py joins them. The events stand in
vnext/state/events.py with their traits, so that a process which only passes events on loads no numpy. What a step does, and who
decides, is elsewhere.
Has met x86-64 Linux (AMD EPYC): `pytest tests/state tests/sim`.
"""
