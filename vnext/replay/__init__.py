"""The log's tool: reads what an engine recorded and folds it again. Knows states and decisions.

Uses no device and no torch, except in `rerun/`, which only exec and bisect import.
Has met x86-64 Linux (AMD EPYC) and every log format so far: `pytest tests/replay`.
"""

from importlib import import_module


def __getattr__(name: str) -> object:
    """`Log`, whose columns need numpy."""
    if name != "Log":
        raise AttributeError(f"vnext.replay has no {name!r}")
    return import_module("vnext.replay.tables.columns").Log
