"""Why a log is slow: what its time was lost to, the true cause first, and what would have helped.

Answers that need no cause are in `answers/`, hypothetical runs in `futures/`.
Has met x86-64 Linux (AMD EPYC): `pytest tests/replay/causes`.
"""
