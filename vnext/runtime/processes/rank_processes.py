"""Rank processes from the outside: started before there are settings to send them.

Their imports are the longest part of a start. So ranks begin with them at once, in the environment that their threads and their
order of sums require, and wait for their settings afterwards. An engine core has their number and their environment, and
starts them before it imports anything itself. Must not import anything slow, since every start imports it.
"""

from __future__ import annotations

from collections.abc import Sequence

from vnext.runtime.processes.determinism import process_environment
from vnext.runtime.processes.subprocesses import Child, start_child
from vnext.runtime.processes.thread_plan import default_threads, why_not
from vnext.runtime.protocol.settings import EngineSettings

CORE = "vnext.runtime.engine.main"
END_GRACE_S = 10.0


def start_ranks(engine: EngineSettings, ranks: Sequence[int] = (), arguments: Sequence[str] = ()) -> list[Child]:
    """The processes of an engine's `ranks` on this host, in order, () for the first ones; none if its one rank lives in the engine
    core's process. Raises OSError where the system starts no more."""
    numbers = ranks or range(count_of(engine))
    environment = environment_of(engine)
    return [start_child(name_of(rank), "vnext.runtime.rank.main", arguments, environment) for rank in numbers]


def start_cores(engine: EngineSettings) -> list[Child]:
    """The processes of all engines' cores, for a program that has yet to find the model: they import meanwhile. None where launch
    refuses the settings. Raises OSError, with nothing started."""
    count = engine.data_parallel_size
    if engine.node_rank or why_not(engine.threads, count * engine.local_world_size, engine.numa):
        return []
    cores: list[Child] = []
    try:
        for replica in range(count):
            cores.append(start_core(engine.core_name(replica), engine))
    except BaseException:
        end_cores(cores)
        raise
    return cores


def end_cores(cores: Sequence[Child]) -> None:
    """End cores that no engine was made of, or that have been ended."""
    for core in cores:
        core.terminate(END_GRACE_S)


def start_core(name: str, engine: EngineSettings) -> Child:
    """The process of an engine core that starts its ranks at once. Raises OSError where the system starts no more."""
    return start_child(name, CORE, (str(count_of(engine)),), environment_of(engine))


def name_of(rank: int) -> str:
    return f"rank {rank}"


def count_of(engine: EngineSettings) -> int:
    """The number of an engine's ranks on this host that have processes."""
    return 0 if engine.executor == "inproc" else engine.local_world_size


def environment_of(engine: EngineSettings) -> dict[str, str]:
    """That of each rank."""
    return process_environment(threads_of(engine), engine.deterministic is not False)


def threads_of(engine: EngineSettings) -> int:
    """The number of threads of each rank."""
    return engine.threads or default_threads(engine.data_parallel_size * engine.local_world_size, engine.numa)


def cpus_of(engine: EngineSettings) -> int:
    """The number of processors that the ranks of one host use."""
    return engine.local_world_size * threads_of(engine)
