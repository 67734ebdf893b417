"""What the simulator raises where a replica, a cache or a stream is not what it must be."""

from __future__ import annotations


class Divergence(Exception):
    """A cache, a replica or a stream is not what it must be: a bug of the engine."""
