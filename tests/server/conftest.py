"""Fixtures of the edge's tests: one server over a fake engine core for the tests that only ask and answer."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[1] / "runtime"))  # fake_engine is shared with the client's own tests

from edge_server import EdgeServer  # noqa: E402  (needs the path above)
from fake_engine import nobody_waits  # noqa: E402

assert nobody_waits  # a fixture for those who ask for it


@pytest.fixture(scope="module")
def server() -> Iterator[EdgeServer]:
    with EdgeServer() as running:
        yield running
