"""The server of tests/e2e."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "e2e"))  # serving
