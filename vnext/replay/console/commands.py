"""What all commands share: exit codes, how a command is declared, how an answer is printed, how an index is made."""

from __future__ import annotations

import argparse
import shutil
import signal
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias, TypeVar

import msgspec
from rich.console import Console

from vnext.log.codec import SEGMENT_SUFFIX
from vnext.replay.console import render
from vnext.replay.console.ended import COMPLETE, Ended, ended, ended_all
from vnext.replay.reading.index import Index
from vnext.replay.reading.source import UnusableLog, open_log

if TYPE_CHECKING:
    from concurrent.futures import ProcessPoolExecutor

SAME, DIFFERENT, UNUSABLE = 0, 1, 2
PIPE_WIDTH = 250
INTERRUPTED, CUT_SHORT = 130, 141  # as shells define them: Ctrl-C, and a closed pipe; no answer is not a good answer
Run = Callable[[argparse.Namespace, Console], int | None]
Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"
Answer = TypeVar("Answer", bound=msgspec.Struct)
Given = TypeVar("Given")
Found = TypeVar("Found")


class Terminal(Console):
    """A console whose reader may close the pipe: `vnext-replay show LOG | head` must not report a difference."""

    def on_broken_pipe(self) -> None:
        try:
            super().on_broken_pipe()
        except SystemExit as ended:
            raise SystemExit(CUT_SHORT) from ended


def terminal(stderr: bool = False) -> Console:
    """A console that prints text verbatim: values from a log are not markup. In a file or a pipe no table is folded."""
    width = shutil.get_terminal_size((PIPE_WIDTH, 0)).columns
    return Terminal(stderr=stderr, width=width, highlight=False, markup=False, emoji=False)


def command(
    commands: Commands, name: str, run: Run, summary: str, more: str, *, aliases: tuple[str, ...] = (), log: bool = True
) -> argparse.ArgumentParser:
    """Declare a command. `run` takes the arguments and a console and returns the exit code, or None for one of 0."""
    described = f"{summary[0].upper()}{summary[1:]}. {more}"
    found: argparse.ArgumentParser = commands.add_parser(name, help=summary, description=described, aliases=aliases)
    if log:
        found.add_argument("log", metavar="LOG", type=Path, help="directory of a log, or one segment file")
    found.add_argument("--json", action="store_true", help="print one JSON object for programs")
    found.set_defaults(run=run)
    return found


def print_answer(
    arguments: argparse.Namespace, console: Console, answer: Answer, print_tables: Callable[[Console, Answer], None]
) -> None:
    """Print the answer as one JSON object or as text, and how the log ends. `arguments.ended` keeps the end for the
    exit code."""
    found = arguments.ended = getattr(arguments, "ended", None) or how_ended(arguments)
    if found.is_sound and (broken := getattr(answer, "ended", "")) not in ("", COMPLETE.line):  # its events cannot have happened
        found = arguments.ended = Ended(kind="damaged", line=f"damaged: {broken}")
    if arguments.json:
        render.print_json(console, answer, ended=found.line)
        return
    print_tables(console, answer)
    print_ended(console, found)


def print_ended(console: Console, found: Ended) -> None:
    """Print one line if there is something to report."""
    if found.kind != "complete":
        line = f"ended: {render.printable(found.line)}"
        console.print(line, style="yellow" if found.is_sound else "bold red", soft_wrap=True)


@contextmanager
def writing(out: Path, what: str = "file") -> Iterator[None]:
    """Write what `-o` names. Raises UnusableLog where the system does not allow it."""
    try:
        yield
    except OSError as error:
        raise UnusableLog(f"{out} cannot be written ({error.strerror}): give another {what} with -o") from error


def how_ended(arguments: argparse.Namespace) -> Ended:
    paths = logs_of(arguments)
    return ended_all([ended(open_log(path)) for path in paths], [str(path) for path in paths])


def in_processes(pool: ProcessPoolExecutor, run: Callable[[Given], Found], given: Iterable[Given]) -> list[Found]:
    """`run` of each, in the pool's processes. Ctrl-C does not reach these, which would each print where they were: it ends them."""
    try:
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # processes begin as the one that starts them
        try:
            found = pool.map(run, given)
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        return list(found)
    except KeyboardInterrupt:
        for process in list(pool._processes.values()):
            process.terminate()
        raise


def top_of(arguments: argparse.Namespace, top_max: int) -> int:
    """The number that `--top` gives. Raises UnusableLog."""
    top: int = arguments.top
    if not 1 <= top <= top_max:
        raise UnusableLog(f"--top {top}: it must lie between 1 and {top_max}")
    return top


def logs_of(arguments: argparse.Namespace) -> list[Path]:
    given = [getattr(arguments, "log", None), getattr(arguments, "other", None), *getattr(arguments, "others", ())]
    return [found for path in map(Path, filter(None, given)) for found in logs_at(path)]


def logs_at(path: Path) -> list[Path]:
    """The logs at a path: a folder that holds no segment itself stands for the logs in it."""
    if path.suffix == SEGMENT_SUFFIX or any(path.glob(f"*{SEGMENT_SUFFIX}")):
        return [path]
    return sorted({each.parent for each in path.glob(f"*/*{SEGMENT_SUFFIX}")})


def index_of(path: Path) -> Index:
    """The index of the log at a path. Shows progress on a terminal while it is built."""
    if not sys.stderr.isatty():
        return Index(open_log(path))
    from rich.progress import Progress  # without a terminal this import would only delay

    progress = Progress(console=terminal(stderr=True), transient=True)
    task = progress.add_task("indexing, once", total=None)

    def reported(done: int, total: int) -> None:
        if not progress.live.is_started:
            progress.start()
        progress.update(task, completed=done, total=total)
        if done >= total:
            progress.stop()

    return Index(open_log(path), reported)
