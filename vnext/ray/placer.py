"""The process that places an engine's other hosts in a Ray cluster: `python -m vnext.ray.placer`, which runtime/hosts/placer.py
starts.

Owns the connection to Ray, one placement group and the actors in it, all of which end with this process. One bundle on this node
reserves what the engine core's own ranks use; each of the others has an actor that runs a host's agent. Ray starts an actor
that ends again, on another node where its own is lost; the engine's recovery does the rest.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import NoReturn

import msgspec
import ray
from ray.exceptions import RayError
from ray.util import get_node_ip_address
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from vnext.base.exits import DONE, FAILED, REFUSED
from vnext.base.installed import first_line
from vnext.base.version import __version__
from vnext.runtime.engine.executor import MpExecutor
from vnext.runtime.hosts.agent import Agent
from vnext.runtime.hosts.placer import PlacerSettings
from vnext.runtime.hosts.wire import WireRefused
from vnext.runtime.processes.launch import StartRefused, find_model
from vnext.runtime.processes.rank_processes import cpus_of
from vnext.runtime.processes.run_dir import RunDir
from vnext.runtime.processes.subprocesses import enter_child
from vnext.runtime.protocol.settings import EngineSettings

JOIN_TIMEOUT_S = 30.0
ROOM_TIMEOUT_S = 60.0
"""How long the cluster gets to make room for all bundles."""
NODE_ID = "ray.io/node-id"


class Refused(Exception):
    """The hosts cannot be placed: one sentence with the remedy."""


def main() -> int:
    settings = msgspec.msgpack.decode(enter_child(), type=PlacerSettings)
    signal.signal(signal.SIGTERM, _leave)
    try:
        join(Path(settings.refusal))
        signal.signal(signal.SIGTERM, _leave)  # Ray has one of its own
        with placed(settings):
            while True:
                signal.pause()
    except Refused as error:
        Path(settings.refusal).write_text(str(error))
        return REFUSED


def _leave(number: int, frame: FrameType | None) -> NoReturn:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise SystemExit(DONE)


def join(refusal: Path) -> None:
    """Join the cluster that RAY_ADDRESS names, else the one of this machine. Raises Refused. Ray itself tries for minutes to reach
    one that does not answer; this process ends before."""
    giving_up = threading.Timer(JOIN_TIMEOUT_S, give_up, (refusal,))
    giving_up.daemon = True
    giving_up.start()
    try:
        ray.init(address="auto", log_to_driver=False, logging_level=logging.ERROR)
    except ConnectionError as error:
        raise Refused(
            "executor is ray, and there is no Ray cluster that this machine belongs to: run `ray start`, or set RAY_ADDRESS to the "
            f"address of one ({first_line(error)})"
        ) from error
    except (RuntimeError, ValueError, OSError, RayError) as error:
        raise Refused(f"executor is ray, and the Ray cluster cannot be joined: {first_line(error)}") from error
    finally:
        giving_up.cancel()


def give_up(refusal: Path) -> None:
    refusal.write_text(
        f"executor is ray, and the Ray cluster has not answered for {JOIN_TIMEOUT_S:g} s: see `ray status`, and whether "
        "RAY_ADDRESS names it"
    )
    os._exit(REFUSED)


@contextmanager
def placed(settings: PlacerSettings) -> Iterator[None]:
    """All hosts have their places until the context ends. Raises Refused."""
    engine, here = settings.engine, ray.get_runtime_context().get_node_id()
    room = {"CPU": cpus_of(engine)}
    require_nodes(engine, room)
    where = [{NODE_ID: here}, *[{NODE_ID: f"!{here}"}] * (engine.nnodes - 1)]
    group = placement_group([room] * engine.nnodes, strategy="STRICT_SPREAD", bundle_label_selector=where)
    try:
        if not group.wait(ROOM_TIMEOUT_S):
            raise Refused(
                f"the Ray cluster has had no room for {ROOM_TIMEOUT_S:g} s: {needs(engine, room)}, this node among them; end what "
                "uses them (see `ray status`), or give fewer --threads"
            )
        agents = [
            ray.remote(NodeAgent)
            .options(
                num_cpus=room["CPU"],
                max_restarts=-1,
                scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=node),
            )
            .remote(
                node,
                msgspec.msgpack.encode(engine),
                (settings.address or get_node_ip_address(), settings.port),
                settings.secret,
                __version__,
            )
            for node in range(1, engine.nnodes)
        ]
        require_agents([agent.refusal.remote() for agent in agents])
        yield
    finally:
        remove_placement_group(group)


def require_nodes(engine: EngineSettings, room: Mapping[str, int]) -> None:
    """Raise Refused if the cluster has too few nodes of this size, whatever they do now."""
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    large = [each for each in nodes if all(each.get(name, 0) >= amount for name, amount in room.items())]
    if len(large) < engine.nnodes:
        raise Refused(
            f"{needs(engine, room)}, and the Ray cluster has {len(large)} such nodes among {len(nodes)}: start more (`ray start "
            "--address ...`), or give fewer --threads or ranks"
        )


def needs(engine: EngineSettings, room: Mapping[str, int]) -> str:
    """What the engine asks of the cluster, in words."""
    return f"--nnodes {engine.nnodes} needs as many nodes with {room['CPU']} CPU(s) for the ranks' threads"


def require_agents(refusals: list[ray.ObjectRef[str]]) -> None:
    """Raise Refused for the first agent that does not start."""
    try:
        found = [refusal for refusal in ray.get(refusals) if refusal]
    except RayError as error:
        raise Refused(f"a node of the Ray cluster cannot run vnext {__version__}: {last_line(error)}") from error
    if found:
        raise Refused(found[0])


def last_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[-1].strip().rstrip(".")


log = logging.getLogger(__name__)


# ---- the actor on a node -------------------------------------------------------------------------------------------
# The actor that runs an agent (runtime/hosts/agent.py) on one node of a Ray cluster.
# Owns the agent's thread: an agent that ends for any reason ends the actor's process, and Ray starts the actor again. Nothing
# of the engine passes through Ray; ring messages and results go over the agent's own connection to the engine core.


class NodeAgent:
    """The agent of host `node`, from the actor's start on. `engine` is an EngineSettings in msgpack, `address` the engine core's,
    `version` its vnext's. `refusal` says why the agent does not run."""

    def __init__(self, node: int, engine: bytes, address: tuple[str, int], secret: bytes, version: str) -> None:
        self._refusal = self._begin(node, engine, address, secret, version)

    @ray.method
    def refusal(self) -> str:
        """One sentence, "" for an agent that runs."""
        return self._refusal

    def _begin(self, node: int, engine: bytes, address: tuple[str, int], secret: bytes, version: str) -> str:
        here = f"node {get_node_ip_address()} of the Ray cluster"
        if version != __version__:
            return f"{here} has vnext {__version__} and the engine's node {version}: install one version on all nodes"
        try:
            path = find_model(msgspec.msgpack.decode(engine, type=EngineSettings))
        except StartRefused as error:
            return f"{here}: {error}"
        agent = Agent(node, str(path), RunDir().path, MpExecutor)
        threading.Thread(target=_run, args=(agent, address, secret), name="agent", daemon=True).start()
        return ""


def _run(agent: Agent, address: tuple[str, int], secret: bytes) -> None:
    try:
        agent.run(address, secret, lambda: True)
    except WireRefused as error:
        log.error("%s.", error)
    except Exception:  # a bug: another actor's process may do better
        log.exception("the agent ended")
    finally:
        os._exit(FAILED)


if __name__ == "__main__":
    sys.exit(main())
