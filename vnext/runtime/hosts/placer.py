"""Placer: the engine core's end of the process that starts an engine's other hosts in a Ray cluster (vnext/ray/placer.py).

Owns that process: started before ranks are, again if it has ended by then, and ended with the engine core. Only that process
imports Ray. Decides nothing about places.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from vnext.base.exits import REFUSED
from vnext.runtime.processes.subprocesses import Child, ChildDied, RankStartFailed, start_child
from vnext.runtime.protocol.settings import EngineSettings

MODULE = "vnext.ray.placer"
EVERY_INTERFACE = "0.0.0.0"
STOP_GRACE_S = 5.0


class PlacerSettings(msgspec.Struct, frozen=True, kw_only=True):
    """`address`, "" for this node's own in the cluster, and `port` are where the agents find the engine core, `secret` is what they
    have to prove. `refusal`: the file for the sentence of a placer that cannot place."""

    engine: EngineSettings
    address: str
    port: int
    secret: bytes
    refusal: str


class Placer:
    """The process, at present. Mutable."""

    def __init__(self, engine: EngineSettings, run_dir: Path) -> None:
        self._engine, self._refusal = engine, run_dir / "placer.refusal"
        self._child: Child | None = None

    @property
    def listens_at(self) -> str:
        """Where the engine core listens: a loopback address, the default, is no address between nodes."""
        return EVERY_INTERFACE if not self._own_address else self._own_address

    @property
    def _own_address(self) -> str:
        return "" if self._engine.master_addr == EngineSettings().master_addr else self._engine.master_addr

    def begin(self, port: int, secret: bytes) -> None:
        """Have the hosts placed, unless that is done. Raises ChildDied, OSError."""
        if self._child is not None:
            if self._child.process.poll() is None:
                return
            self._child.terminate(0.0)
        self._child = start_child("placer", MODULE)
        settings = PlacerSettings(
            engine=self._engine, address=self._own_address, port=port, secret=secret, refusal=str(self._refusal)
        )
        self._child.send_config(msgspec.msgpack.encode(settings))

    def check(self) -> None:
        """Raise RankStartFailed with its sentence if the hosts cannot be placed, ChildDied if the process has ended otherwise."""
        assert self._child is not None, "it has begun"
        try:
            self._child.check_alive()
        except ChildDied as error:
            if error.returncode == REFUSED and self._refusal.is_file():
                raise RankStartFailed(self._refusal.read_text()) from error
            raise

    def close(self) -> None:
        """End the process, and with it all that it has placed. Idempotent."""
        if self._child is not None:
            self._child.terminate(STOP_GRACE_S)
