"""Fixtures that every room's tests may use, the options of the test run, and the walk that goes on beside it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from walking import Walk

ROOT = Path(__file__).resolve().parents[1]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--walk-events", type=int, default=1_000_000, help="events of the seeded simulation in tests/sim (default 1000000)"
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


# ---- the walk ----------------------------------------------------------------------------------------------------


WALK = pytest.StashKey[Walk]()


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "walk: waits for a part of the walk, which goes on from the first test on")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Who waits for the walk comes last."""
    items.sort(key=lambda item: item.get_closest_marker("walk") is not None)


@pytest.fixture(scope="session", autouse=True)
def walk(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Walk | None]:
    """The walk over the parts that are asked for, from the first test of the run to its last; None if none is."""
    parts = [item.callspec.params["part"] for item in request.session.items if item.get_closest_marker("walk")]
    if not parts:
        yield None
        return
    walk = Walk(parts, request.config.getoption("--walk-events"), tmp_path_factory.mktemp("walk"))
    request.config.stash[WALK] = walk
    yield walk
    walk.stop()


def pytest_terminal_summary(terminalreporter, config: pytest.Config) -> None:
    walk = config.stash.get(WALK, None)
    if walk is not None and walk.results:
        terminalreporter.write_line(walk.summary())


# ------------------------------------------------------------------------------------------------------------------


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
