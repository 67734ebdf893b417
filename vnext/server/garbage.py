"""Garbage: how often Python's collector searches in a process that serves. Owns its settings."""

from __future__ import annotations

import gc

from vnext.server.context.text_work import trim

_NEW_OBJECTS_MAX = 5_000
"""Before the collector looks at them, for a millisecond."""


def settle() -> None:
    """Have the collector search for garbage rarely, and never among what lives by now. A request's objects die without it; only
    asyncio's connections are cycles. What reading the tokenizer has freed goes back to the system."""
    gc.collect()
    trim()
    gc.freeze()
    gc.set_threshold(_NEW_OBJECTS_MAX)
