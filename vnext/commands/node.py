"""`vnext serve` on every host but an engine's first: an agent that starts this host's ranks when the master asks (--node-rank)."""

from __future__ import annotations

import signal
from pathlib import Path
from types import FrameType

from vnext.base.exits import DONE, REFUSED
from vnext.runtime.engine.executor import MpExecutor
from vnext.runtime.hosts.agent import Agent
from vnext.runtime.hosts.wire import WireRefused, secret_of
from vnext.runtime.processes.launch import StartRefused, find_model
from vnext.runtime.processes.run_dir import RunDir
from vnext.runtime.protocol.settings import EngineSettings, SettingsError
from vnext.server.console import write_error, write_line


def serve_node(engine: EngineSettings) -> int:
    """Serve until a signal comes; returns the exit status. For every status but 0, it prints one sentence on stderr."""
    is_asked = False

    def leave(number: int, frame: FrameType | None) -> None:
        nonlocal is_asked
        is_asked = True

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, leave)
    try:
        model_path, secret = find_model(engine), secret_of(engine.cluster_secret_file)
    except (StartRefused, SettingsError) as error:
        write_error(f"vnext: {error}")
        return REFUSED
    run_dir = RunDir()
    try:
        agent = Agent(engine.node_rank, str(model_path), Path(run_dir.path), MpExecutor)
        agent.run((engine.master_addr, engine.master_port), secret, lambda: not is_asked)
    except WireRefused as error:
        write_error(f"vnext: {error}")
        return REFUSED
    finally:
        run_dir.remove()
    write_line("vnext: stopped")
    return DONE
