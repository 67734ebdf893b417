"""Exit statuses of the commands `vnext` and `vnext-bench` and of their processes.

    0   the command did its work, or a signal ended it in order
    1   the command failed after it had begun
    2   the input cannot be used: an option, a model, a port, a folder, a URL. Nothing has begun
    75  of an engine core: it has met an error, and another one may go on with its requests
    130 Ctrl-C, with one line; of a measurement what had ended is printed. Ctrl-C ends a server or a chat with 0

`vnext-replay` uses the same statuses; a log that differs is a failure (vnext/replay/console/commands.py).
"""

from __future__ import annotations

DONE, FAILED, REFUSED, FOLLOWED, INTERRUPTED = 0, 1, 2, 75, 130
