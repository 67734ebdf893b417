"""Fixtures that every room's tests may use, and the one option of the test run."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--walk-events", type=int, default=100_000, help="events of the seeded simulation in tests/sim (default 100000)"
    )
    parser.addoption("--rewrite", action="store_true", help="write the traces of tests/golden anew, to be reviewed as a diff")


@pytest.fixture(scope="session")
def documented_policies(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The code of docs/policies.md as an importable module; its name."""
    parts = (ROOT / "docs" / "policies.md").read_text().split("```python\n")[1:]
    folder = tmp_path_factory.mktemp("documented")
    (folder / "house_policies.py").write_text("\n\n".join(part.split("```")[0] for part in parts))
    sys.path.insert(0, str(folder))
    yield "house_policies"
    sys.path.remove(str(folder))


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
