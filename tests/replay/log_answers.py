"""Logs of the fake engine by privacy, and what commands answer of them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from log_drive import record

from vnext.log.codec import Frame
from vnext.replay.cli.main import main
from vnext.replay.reading.source import open_log

PRIVACY = pytest.mark.parametrize("privacy", ["full", "shape"])


def logs_by_privacy(tmp_path_factory: pytest.TempPathFactory, **more: object) -> dict[str, Path]:
    """Of 60 arrivals, in segments of 3 kB; `whole` is `full` in one."""
    folder = tmp_path_factory.mktemp("logs")
    more = dict(arrivals=60, timestamped=True, **more)
    made = {privacy: record(folder / privacy, privacy, size=3000, **more) for privacy in ("full", "shape")}
    return made | {"whole": record(folder / "whole", "full", **more)}


def answer(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, dict]:
    """The exit status, and what the command says as JSON."""
    capsys.readouterr()
    code = main([*map(str, arguments), "--json"])
    return code, json.loads(capsys.readouterr().out)


def events_of(log_dir: Path) -> list:
    """All events."""
    return [event for item in open_log(log_dir).items() if isinstance(item, Frame) for event in item.events]
