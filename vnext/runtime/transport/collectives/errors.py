"""Errors among ranks. Imports nothing, so that a rank's process can name them before torch is imported."""

from __future__ import annotations


class GaveUp(RuntimeError):
    """Another rank lacks memory for the step in which this one waits for it, so that no rank goes on with it. Says which."""


class RankLost(RuntimeError):
    """Another rank has ended, left the group or does not come: this rank cannot go on."""
