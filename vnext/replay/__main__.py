"""`python -m vnext.replay`: the same as the command `vnext-replay`."""

from __future__ import annotations

import sys

from vnext.replay.cli.main import process

if __name__ == "__main__":
    sys.exit(process())
