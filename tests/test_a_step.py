"""docs/a-step.md is true: its example is run, and an engine at work calls the functions of its stops in its order."""

from __future__ import annotations

import doctest
import re
import sys
import threading
from pathlib import Path
from types import FrameType

from engine_here import engines_here

from vnext import LLM, SamplingParams

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "a-step.md"
STOP = re.compile(r"^(\d+)\. ", re.MULTILINE)
FUNCTION = re.compile(r"^ +- `(vnext/\S+\.py)` `(\S+)`$", re.MULTILINE)


def test_the_example_is_what_the_code_does() -> None:
    example = doctest.DocTestParser().get_doctest(PAGE.read_text(), {}, PAGE.name, str(PAGE), 0)
    assert len(example.examples) > 15
    said: list[str] = []
    assert doctest.DocTestRunner().run(example, out=said.append).failed == 0, "".join(said)


def test_an_engine_passes_the_stops_in_their_order(tmp_path: Path) -> None:
    text = PAGE.read_text()
    assert STOP.findall(text) == [str(number) for number in range(1, 11)]
    stops = FUNCTION.findall(text)
    calls = iter(calls_of(set(stops), tmp_path))
    missed = [stop for stop in stops if stop not in calls]  # each is looked for behind the one before
    assert missed == []


def calls_of(functions: set[tuple[str, str]], log_dir: Path) -> list[tuple[str, str]]:
    """The calls of these functions, file and name, while an engine answers two requests: the first may come within a turn of the
    loop, whose call was before."""
    calls: list[tuple[str, str]] = []
    armed: list[bool] = []

    def note(frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        name = (code.co_filename.removeprefix(f"{ROOT}/"), code.co_qualname)
        if armed and event == "call" and name in functions:
            calls.append(name)

    threading.setprofile(note)  # of the threads that begin from now on: the engine core and its client
    try:
        with engines_here(), LLM(executor="inproc", log_dir=str(log_dir), async_scheduling=False) as llm:
            sys.setprofile(note)
            armed.append(True)
            for prompt in ("The", "def"):
                llm.generate([prompt], SamplingParams(max_tokens=2, temperature=0.0))
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    return calls
