"""The API process's main: `python -m vnext.server`, a child that first receives its ServerSettings as JSON."""

from __future__ import annotations

import gc
import sys

import msgspec

from vnext.runtime.children import enter_child
from vnext.server.settings import ServerSettings


def main() -> int:
    """Returns the exit code."""
    gc.disable()  # what is imported stays: looking for garbage in it takes a sixth of the imports' time
    from vnext.server.run import run_server

    gc.freeze()
    gc.enable()
    settings = msgspec.json.decode(enter_child(), type=ServerSettings)
    return run_server(settings, settings.engine_address, settings.model_path)


if __name__ == "__main__":
    sys.exit(main())
