"""Console: lines for the operator on standard output and standard error. The server keeps serving when their reader has gone."""

from __future__ import annotations

import os
import sys

from vnext.runtime.log_lines import line


def write_line(words: str) -> None:
    """Print and flush."""
    try:
        print(line(words), flush=True)
    except BrokenPipeError:  # discard all further output, Python's buffered rest included
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)


def write_error(sentence: str) -> None:
    """Print on standard error and flush."""
    print(line(sentence, "ERROR"), file=sys.stderr, flush=True)
