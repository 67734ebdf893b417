"""Rank processes from the outside: started before there are settings to send them.

Importing torch is the longest part of a start. So ranks begin with it at once, in the environment that their threads and their
order of sums require, and wait for their settings afterwards. Must not import anything slow, since every start imports it.
"""

from __future__ import annotations

from collections.abc import Sequence

from vnext.runtime.processes.determinism import process_environment
from vnext.runtime.processes.subprocesses import Child, start_child
from vnext.runtime.processes.thread_plan import default_threads
from vnext.runtime.protocol.settings import EngineSettings


def start_ranks(engine: EngineSettings, ranks: Sequence[int] = (), arguments: Sequence[str] = ()) -> list[Child]:
    """The processes of an engine's `ranks` on this host, in order, () for the first ones; none if its one rank lives in the engine
    core's process. Raises OSError where the system starts no more."""
    if engine.executor == "inproc":
        return []
    environment = process_environment(threads_of(engine), engine.deterministic is not False)
    names = [f"rank {rank}" for rank in ranks or range(engine.local_world_size)]
    return [start_child(name, "vnext.runtime.rank.main", arguments, environment) for name in names]


def threads_of(engine: EngineSettings) -> int:
    """The number of threads of each rank."""
    return engine.threads or default_threads(engine.data_parallel_size * engine.local_world_size, engine.numa)


def cpus_of(engine: EngineSettings) -> int:
    """The number of processors that the ranks of one host use."""
    return engine.local_world_size * threads_of(engine)
