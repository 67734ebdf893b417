"""`python -m vnext` is the command `vnext`, for an environment whose commands are not on the path."""

from __future__ import annotations

import sys

from vnext.commands.cli import main

if __name__ == "__main__":
    sys.exit(main())
