"""Binding: a rank on the CPU takes its place among the machine's cores and nodes."""

from __future__ import annotations

import os
from contextlib import suppress

from vnext.kernels.cpu import memory, native
from vnext.runtime.processes.placement import Place, places
from vnext.runtime.processes.topology import here
from vnext.runtime.protocol.settings import RankSettings, SettingsError


def place_of(settings: RankSettings) -> Place:
    """Where this rank computes. Raises SettingsError."""
    try:
        return places(here(), settings.place_count, settings.threads, settings.numa)[settings.place]
    except ValueError as error:
        raise SettingsError(str(error)) from error


def bind(place: Place) -> None:
    """Bind the calling thread, and all that it will start, to the place. The threads of the kernels' pool follow by `bind_members`,
    once there are any. Where the system refuses, they run anywhere."""
    if place.cpus and hasattr(os, "sched_setaffinity"):
        with suppress(OSError):
            os.sched_setaffinity(0, place.cpus)
    memory.spread_over(place.nodes)


def bind_members(place: Place) -> None:
    """Bind the threads of the kernels' pool, the caller being the first."""
    for member, cpus in enumerate(place.members):
        native.bind_member(member, cpus)
