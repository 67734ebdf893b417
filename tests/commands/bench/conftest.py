"""The path to the fake server of tests/server, which load is sent to here."""

import sys
from pathlib import Path

sys.path += [str(Path(__file__).parents[2] / room) for room in ("server", "runtime")]
