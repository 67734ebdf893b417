"""Errors of ranks that start and of hosts. Imports nothing."""

from __future__ import annotations


class RankStartFailed(Exception):
    """A rank could not start: the rank's own sentence."""


class HostLost(RuntimeError):
    """A host of the engine, or its ranks, cannot be reached any more: one sentence."""
