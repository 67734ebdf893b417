"""Fixtures that every room's tests may use, and the one option of the test run."""

from __future__ import annotations

from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--walk-events", type=int, default=100_000, help="events of the seeded simulation in tests/sim (default 100000)"
    )


@pytest.fixture(scope="session")
def walk_event_count(request: pytest.FixtureRequest) -> int:
    """Events that the seeded simulation is asked for."""
    return request.config.getoption("--walk-events")


@pytest.fixture(scope="session")
def root() -> Path:
    """The checkout."""
    return ROOT


@pytest.fixture(scope="session")
def stories_path() -> Path:
    """A trained toy model in the format of Hugging Face; tests that need it are skipped where it is missing."""
    for folder in (ROOT / "shared", ROOT.parent / "shared"):
        path = folder / "models" / "stories260k"
        if (path / "model.safetensors").is_file():
            return path
    pytest.skip("the model stories260k is not here: put it into ../shared/models/stories260k to run this test")
