"""The API process's main: `python -m vnext.server`, a child that first receives its ServerSettings as JSON."""

from __future__ import annotations

import gc
import sys

import msgspec

from vnext.base.quick_tuples import quick_tuples
from vnext.runtime.processes.subprocesses import enter_child
from vnext.server.settings import ServerSettings
from vnext.server.tls import without_certificates


def main() -> int:
    """Returns the exit code."""
    gc.disable()  # imported objects stay alive: collecting garbage among them takes a sixth of the import time
    with without_certificates(), quick_tuples():
        from vnext.server.run import run_server

    gc.freeze()
    gc.enable()
    settings = msgspec.json.decode(enter_child(), type=ServerSettings)
    return run_server(settings, settings.engine_address, settings.model_path)


if __name__ == "__main__":
    sys.exit(main())
