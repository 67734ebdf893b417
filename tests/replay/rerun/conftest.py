"""What the tests of the model's side share: small checkpoints, and where their makers are."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

for room in ("models", "replay"):
    sys.path.append(str(Path(__file__).resolve().parents[2] / room))

from vnext.replay.cli.main import main  # noqa: E402


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of Llama's form with random weights, two layers, float32."""
    from checkpoints import save_checkpoint

    return save_checkpoint(tmp_path_factory.mktemp("checkpoint"))


@pytest.fixture
def answer(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, dict]]:
    """A command's exit code and its answer as --json prints it."""

    def run(*arguments: object) -> tuple[int, dict]:
        code = main([*map(str, arguments), "--json"])
        return code, json.loads(capsys.readouterr().out)

    return run


@pytest.fixture
def sentence(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """The one sentence of a command that has nothing to work with."""

    def run(*arguments: object) -> str:
        assert main([*map(str, arguments)]) == 2
        said = capsys.readouterr()
        assert said.out == "" and said.err.count("\n") == 1
        return said.err

    return run
