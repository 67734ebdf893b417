"""The command that opens a page: ui."""

from __future__ import annotations

import argparse
import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from vnext.log.codec import SEGMENT_SUFFIX
from vnext.replay.console import render
from vnext.replay.console.commands import Commands, command, how_ended, print_ended
from vnext.replay.console.ended import COMPLETE
from vnext.replay.reading.mirror import Mirror
from vnext.replay.reading.source import UnusableLog
from vnext.replay.reading.tail import newest_log

if TYPE_CHECKING:
    from vnext.replay.ui.live import LiveLog

KEY_VARIABLE = "VNEXT_API_KEY"
ADDRESSES = ("http://", "https://")


def add(commands: Commands) -> None:
    scrubbing = command(
        commands, "ui", _ui, "serve a page to browse a log: timeline, blocks, queue, requests, why they wait",
        "Serves on 127.0.0.1 until you stop it; shows two logs side by side. With --live it follows a running engine.",
        log=False,
    )  # fmt: skip
    scrubbing.add_argument("log", metavar="LOG", help="directory of a log, or one segment file; with --live also a server's URL")
    scrubbing.add_argument("other", metavar="OTHER", nargs="?", type=Path, help="a second log, for comparison")
    scrubbing.add_argument(
        "--live", action="store_true",
        help="follow a running engine: LOG is the URL of a server with --show-log, or on its machine its log or all logs' folder",
    )  # fmt: skip
    scrubbing.add_argument("--api-key", default="", help=f"the server's key; prefer {KEY_VARIABLE}")
    scrubbing.add_argument("--port", type=int, default=0, help="port of the page; 0 lets the system choose (default)")


def _ui(arguments: argparse.Namespace, console: Console) -> None:
    """Imports the server here, so that other commands do not wait for it."""
    import asyncio

    from vnext.replay.ui import app, opened as complete

    def ready(address: str) -> None:
        if arguments.json:
            render.print_json(console, {"address": address}, ended=arguments.ended.line)
        else:
            console.print(f"open {address} (Ctrl-C ends)")
            print_ended(console, arguments.ended)

    arguments.ended = COMPLETE  # a growing log has not ended
    with contextlib.ExitStack() as stack, contextlib.suppress(KeyboardInterrupt):
        if arguments.live:
            opened: list[app.Shown] = [stack.enter_context(_followed(arguments))]
        else:
            opened = [complete.Opened(path) for path in (_path(arguments.log), arguments.other) if path is not None]
            arguments.ended = how_ended(arguments)
        asyncio.run(app.serve(opened, arguments.port, ready))


def _path(text: str) -> Path:
    if text.startswith(ADDRESSES):
        raise UnusableLog(f"{text} is an address: add --live to follow the server there")
    return Path(text)


@contextlib.contextmanager
def _followed(arguments: argparse.Namespace) -> Iterator[LiveLog]:
    """Yield the requested running engine; stop following it when the block ends."""
    from vnext.replay.ui.live import LiveLog

    if arguments.other is not None:
        raise UnusableLog("--live shows one log: leave the second one out")
    if ":" in arguments.log and "://" not in arguments.log and not Path(arguments.log).exists():
        raise UnusableLog(f"{arguments.log} is no folder: an address begins with http://")
    with contextlib.ExitStack() as stack:
        mirror, folder = None, Path(arguments.log)
        if "://" in arguments.log:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="vnext-live-")))
            mirror = Mirror(arguments.log, arguments.api_key or os.environ.get(KEY_VARIABLE, ""), folder)
            stack.callback(mirror.close)
        elif folder.is_dir() and not any(folder.glob(f"*{SEGMENT_SUFFIX}")):
            folder = newest_log(folder)
        found = LiveLog(folder, mirror)
        stack.callback(found.close)
        yield found
