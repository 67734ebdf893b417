"""Exit statuses of the commands `vnext` and `vnext-bench`, of their processes too: one rule.

    0   what was asked for was done, or it was ended by a signal in order
    1   what had begun has failed
    2   what was given cannot be used: an option, a model, a port, a folder, a URL. Nothing has begun
    130 Ctrl-C before a measurement was there; a server's or a talk's end by Ctrl-C is 0

`vnext-replay` has the same, and calls it a failure when a log differs (vnext/replay/commands.py).
"""

from __future__ import annotations

DONE, FAILED, REFUSED, INTERRUPTED = 0, 1, 2, 130
