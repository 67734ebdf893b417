"""Rank processes from the outside: their start, before anybody has settings to send them.

Importing torch is the longest part of a start, so ranks begin with it at once, in the environment that their threads and
their order of sums ask for, and wait for their settings afterwards. May import nothing slow: it stands in everybody's way.
"""

from __future__ import annotations

from vnext.runtime.children import Child, start_child
from vnext.runtime.cores import default_threads
from vnext.runtime.determinism import process_environment
from vnext.runtime.settings import EngineSettings


def start_ranks(engine: EngineSettings) -> list[Child]:
    """The processes of an engine's ranks, in order; none where its rank lives in the engine core's process."""
    if engine.executor == "inproc":
        return []
    environment = process_environment(threads_of(engine), engine.deterministic is not False)
    names = [f"rank {rank}" for rank in range(engine.tensor_parallel_size)]
    return [start_child(name, "vnext.runtime.rank_main", environment=environment) for name in names]


def threads_of(engine: EngineSettings) -> int:
    """Threads of each rank."""
    return engine.threads or default_threads(engine.tensor_parallel_size)
