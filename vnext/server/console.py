"""Console: lines for the operator on standard output and standard error. The server keeps serving when their reader has gone, or
when they go to a file for which there is no room. A report that cannot be written ends its program.
"""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from vnext.base.exits import FAILED
from vnext.runtime.protocol.log_lines import line

UNWRITTEN = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EPIPE)
"""Errors of an output that takes no more."""


def write_line(words: str) -> None:
    """Print and flush."""
    try:
        print(line(words), flush=True)
    except OSError:
        _discard(sys.stdout.fileno())


def write_error(sentence: str) -> None:
    """Print on standard error and flush."""
    try:
        print(line(sentence, "ERROR"), file=sys.stderr, flush=True)
    except OSError:
        _discard(sys.stderr.fileno())


@contextmanager
def reporting(program: str) -> Iterator[None]:
    """What is printed until the block ends is the program's result: if it cannot be written, one sentence and status 1 end the
    program. No sentence for a reader who has seen enough and gone."""
    try:
        yield
        sys.stdout.flush()
    except OSError as error:
        if error.errno not in UNWRITTEN or error.filename is not None:
            raise
        _discard(sys.stdout.fileno())
        if not isinstance(error, BrokenPipeError):
            write_error(f"{program}: the output cannot be written ({error.strerror}): make room for it, or send it elsewhere.")
        raise SystemExit(FAILED) from error


def _discard(handle: int) -> None:
    """Discard all further output there, Python's buffered rest included."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, handle)
    os.close(nowhere)
