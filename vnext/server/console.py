"""Console: lines for the operator on standard output and standard error, and the curl line that gets an answer from a server.

The server keeps serving when the lines' reader has gone or reads nothing, or when they go to a file for which there is no room.
A report that cannot be written ends its program.
"""

from __future__ import annotations

import errno
import json
import os
import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from vnext.base.exits import FAILED
from vnext.runtime.protocol.log_lines import STDERR, STDOUT, line
from vnext.server.settings import API_KEY_VARIABLE, ServerSettings
from vnext.server.tls import is_loopback

UNWRITTEN = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EPIPE)
"""Errors of an output that takes no more."""
EXAMPLE_WORDS = "What is Python?"


def write_line(words: str) -> None:
    """Write a line for the operator. It is left out where nobody takes it."""
    (STDOUT if sys.stdout is sys.__stdout__ else sys.stdout).write(line(words) + "\n")


def write_error(sentence: str) -> None:
    (STDERR if sys.stderr is sys.__stderr__ else sys.stderr).write(line(sentence, "ERROR") + "\n")


def say_who_comes_in(settings: ServerSettings) -> None:
    """A line if others reach the server and it asks for no key."""
    if not settings.needs_key and not is_loopback(settings.host):
        write_line(f"vnext: whoever reaches {settings.host} may use this server, since it has no key: give it --api-key")


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


def curl_line(url: str, *, chat: bool, has_key: bool) -> str:
    """A command for the reader's shell. It names the key's variable and never shows the key."""
    key = f' -H "Authorization: Bearer ${API_KEY_VARIABLE}"' if has_key else ""
    asked = {"messages": [{"role": "user", "content": EXAMPLE_WORDS}]} if chat else {"prompt": EXAMPLE_WORDS}
    path = "chat/completions" if chat else "completions"
    body = json.dumps(asked | {"max_tokens": 60, "temperature": 0})
    return f"curl -s {shlex.quote(url)}/v1/{path} -H 'Content-Type: application/json'{key} -d {shlex.quote(body)}"
