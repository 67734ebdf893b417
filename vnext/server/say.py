"""Words for whoever started the server, on standard output. A reader that is gone is no reason to stop serving."""

from __future__ import annotations

import os
import sys


def say(words: str) -> None:
    """Print, at once."""
    try:
        print(words, flush=True)
    except BrokenPipeError:  # from now on into nothing, what Python still holds of it too
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)
