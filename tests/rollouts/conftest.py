"""Servers, as the tests of whole engines start them."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "e2e"))
