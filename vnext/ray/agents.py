"""The actor that runs an agent (runtime/hosts/agent.py) on one node of a Ray cluster.

Owns the agent's thread: an agent that ends for any reason ends the actor's process, and Ray starts the actor again. Nothing of the
engine passes through Ray; ring messages and results go over the agent's own connection to the engine core.
"""

from __future__ import annotations

import logging
import os
import threading

import msgspec
from ray.util import get_node_ip_address

from vnext.base.exits import FAILED
from vnext.base.version import __version__
from vnext.runtime.engine.executor import MpExecutor
from vnext.runtime.hosts.agent import Agent
from vnext.runtime.hosts.wire import WireRefused
from vnext.runtime.processes.launch import StartRefused, find_model
from vnext.runtime.processes.run_dir import RunDir
from vnext.runtime.protocol.settings import EngineSettings

log = logging.getLogger(__name__)


class NodeAgent:
    """The agent of host `node`, from the actor's start on. `engine` is an EngineSettings in msgpack, `address` the engine core's,
    `version` its vnext's. `refusal` says why the agent does not run."""

    def __init__(self, node: int, engine: bytes, address: tuple[str, int], secret: bytes, version: str) -> None:
        self._refusal = self._begin(node, engine, address, secret, version)

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
