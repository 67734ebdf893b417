"""The programs of examples/ and of docs/python.md run as they stand, with the demo model."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from saved_adapters import DEMO, save_adapter

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
NOTEBOOK = """
import ast, asyncio, json, sys

async def run():
    names = {}
    for cell in json.load(open(sys.argv[1]))["cells"]:
        if cell["cell_type"] == "code":
            code = compile("".join(cell["source"]), cell["id"], "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
            if (waits := eval(code, names)) is not None:
                await waits

asyncio.run(run())
"""
PROGRAMS = re.findall(r"^```python\n(.*?)^```", (ROOT / "docs" / "python.md").read_text(), re.MULTILINE | re.DOTALL)


def printed(folder: Path, *command: object) -> str:
    """What a Python program prints; `folder` is its home."""
    environment = {"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin", "HOME": str(folder)}
    found = subprocess.run([sys.executable, *command], cwd=folder, env=environment, capture_output=True, text=True, timeout=240)
    assert found.returncode == 0, found.stderr
    assert "Traceback" not in found.stderr, found.stderr
    return found.stdout


@pytest.mark.parametrize("program", PROGRAMS, ids=[each.split("from vnext import ")[1].split(",")[0] for each in PROGRAMS])
def test_the_programs_of_the_page(program: str, tmp_path: Path) -> None:
    assert printed(tmp_path, "-c", program)


def test_every_example_is_on_the_page_and_tested() -> None:
    names = {path.name for path in EXAMPLES.iterdir() if path.is_file()}
    page, tests = (ROOT / "docs" / "python.md").read_text(), Path(__file__).read_text()
    assert {name for name in names if f"(../examples/{name})" not in page} == set()
    assert {name for name in names if f'EXAMPLES / "{name}"' not in tests} == {
        "check_family.py", "family.py", "policy_gradient.py",
    }, "which tests/models and tests/rollouts run"  # fmt: skip


def test_an_offline_batch(tmp_path: Path) -> None:
    assert printed(tmp_path, EXAMPLES / "offline_batch.py") == ""
    own = [json.loads(line) for line in (tmp_path / "answers.jsonl").read_text().splitlines()]
    assert [*own[0]] == ["prompt", "answer", "finish_reason"] and own[1]["answer"].startswith("Python is a programming language")
    (tmp_path / "in.jsonl").write_text(json.dumps({"prompt": "import", "id": 7}) + "\n")
    printed(tmp_path, EXAMPLES / "offline_batch.py", "in.jsonl", "out.jsonl", "--max-tokens", "3")
    (answer,) = map(json.loads, (tmp_path / "out.jsonl").read_text().splitlines())
    assert (answer["prompt"], answer["id"], answer["finish_reason"]) == ("import", 7, "length") and answer["answer"]


def test_structured_output(tmp_path: Path) -> None:
    lines = printed(tmp_path, EXAMPLES / "structured_output.py").splitlines()
    forms = (r"a schema: Ticket\(kind='(bug|question|praise)', urgent=(True|False), minutes=\d+\)",
             r"a choice: (positive|negative|neutral)", r"a pattern: \d{4}-\d\d")  # fmt: skip
    assert len(lines) == 6 and all(re.fullmatch(form, line) for form, line in zip(sorted([*forms] * 2, key=forms.index), lines))


def test_adapters(tmp_path: Path) -> None:
    """The demo model's own answer is that of no adapter, and each adapter has another."""
    lines = dict(line.split(": ", 1) for line in printed(tmp_path, EXAMPLES / "lora.py").splitlines())
    assert [*lines] == ["no adapter", "random-1", "random-2"] and len({*lines.values()}) == 3
    assert lines["no adapter"].startswith("' provides low-level access") or lines["no adapter"].startswith('" provides')
    folder = save_adapter(DEMO, tmp_path / "mine")
    assert [*dict(line.split(": ", 1) for line in printed(tmp_path, EXAMPLES / "lora.py", DEMO, folder).splitlines())] == [
        "no adapter", "mine",
    ]  # fmt: skip


def test_answers_at_once(tmp_path: Path) -> None:
    lines = printed(tmp_path, EXAMPLES / "async_answers.py").splitlines()
    assert sum(line.startswith("What ") for line in lines) == 4 and sum(line.endswith(" ...") for line in lines) == 1
    assert any(line.startswith("What is Python? Python is") for line in lines)


def test_the_notebook(tmp_path: Path) -> None:
    """Its cells run in their order in one program with an event loop, as in a notebook. It is kept without outputs."""
    path = EXAMPLES / "notebook.ipynb"
    book = json.loads(path.read_text())
    assert (book["nbformat"], book["nbformat_minor"]) == (4, 5) and book["metadata"]["kernelspec"]["name"] == "python3"
    assert len({cell["id"] for cell in book["cells"]}) == len(book["cells"])
    code = [cell for cell in book["cells"] if cell["cell_type"] == "code"]
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in code)
    found = printed(tmp_path, "-c", NOTEBOOK, path)
    assert "'The module': ' provides" in found or "'The module': \" provides" in found
    assert "Python is a programming language" in found
