"""The command that opens a page: ui."""

from __future__ import annotations

import argparse
import contextlib
from pathlib import Path

from rich.console import Console

from vnext.replay import render
from vnext.replay.commands import SAME, command


def add(commands) -> None:
    """Declare it."""
    scrubbing = command(
        commands, "ui", _ui, "a page to walk through a log: time line, blocks, queue, requests, why they wait",
        "Serves on 127.0.0.1 until it is stopped; two logs stand side by side.",
    )  # fmt: skip
    scrubbing.add_argument("other", metavar="OTHER", nargs="?", type=Path, help="a second log, to be compared")
    scrubbing.add_argument("--port", type=int, default=0, help="0 lets the system choose (default)")


def _ui(arguments: argparse.Namespace, console: Console) -> int:
    """What serves is imported here: no other command waits for it."""
    import asyncio

    from vnext.replay.ui.app import Opened, serve

    opened = [Opened(path) for path in (arguments.log, arguments.other) if path is not None]

    def ready(address: str) -> None:
        if arguments.json:
            render.print_json(console, {"address": address})
        else:
            console.print(f"open {address} (Ctrl-C ends)")

    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(serve(opened, arguments.port, ready))
    return SAME
