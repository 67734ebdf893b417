"""Console: lines for the operator on standard output. The server keeps serving when their reader has gone."""

from __future__ import annotations

import os
import sys


def write_line(words: str) -> None:
    """Print and flush."""
    try:
        print(words, flush=True)
    except BrokenPipeError:  # discard all further output, Python's buffered rest included
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)
