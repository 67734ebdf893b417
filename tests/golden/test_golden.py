"""Golden traces: every script of this folder does what its trace says. `pytest tests/golden --rewrite` writes them anew."""

from __future__ import annotations

from pathlib import Path

import pytest
from golden_script import played

SCRIPTS = sorted(Path(__file__).parent.glob("*.txt"))


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
@pytest.mark.usefixtures("documented_policies")
def test_a_script_does_what_its_trace_says(path: Path, request: pytest.FixtureRequest) -> None:
    written = path.read_text()
    trace = played(written)
    if request.config.getoption("--rewrite"):
        path.write_text(trace)
        return
    assert trace.splitlines() == written.splitlines()


def test_a_wrong_trace_is_seen() -> None:
    script = "engine\narrive a prompt=1*3\nstep\n"
    right = played(script)
    assert played(right) == right and "+a[0,3)*" in right
    assert played(right.replace("[0,3)", "[0,2)")) == right, "a trace is never read, only compared"
    with pytest.raises(ValueError, match="no command 'dance'"):
        played("dance\n")
