"""Fixtures of the edge's tests: one server over a fake engine core for the tests that only ask and answer."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[1] / "runtime"))  # fake_engine is shared with the client's own tests

from edge_server import EdgeServer  # noqa: E402  (needs the path above)


@pytest.fixture(scope="module")
def server() -> Iterator[EdgeServer]:
    with EdgeServer() as running:
        yield running
