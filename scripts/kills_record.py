"""The record of `kill_under_load.py --survive`, written anew at each kill, so that a run that is cut short keeps what it has found.

Owns its format: parts, each a run of one server with a seed of its own, and the summary of all. A record can be added to.
"""

from __future__ import annotations

import json
import os
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
from kills_survived import Load, Survived, percentile

from vnext.base.version import __version__
from vnext.commands.machine import machine

COMMAND = "python scripts/kill_under_load.py --survive --kills N --seed N --json RECORD, once for each part"


class Part(msgspec.Struct, kw_only=True):
    """One server of `model`, a folder's name. `rested`: processes stood by at each kill. `tier`: with a disk tier in shared memory.
    `load`: the machine's load averages before. `logs`: how many verify, None for a run that was cut short. `first_token_p50_s` and
    `first_token_p95_s`: of all streams, when they come to the idle server at once, to compare with what a recovery computes."""

    seed: int
    streams: int
    rested: bool
    measured_at: str
    tier: bool = False
    ranks: int = 2
    model: str = "demo"
    load: tuple[float, float, float] = (0.0, 0.0, 0.0)
    seconds: float = 0.0
    first_token_p50_s: float = 0.0
    first_token_p95_s: float = 0.0
    answers_compared: int = 0
    tokens: int = 0
    logs: int | None = None
    wrong: list[str] = []
    survived: list[Survived] = []


class Record(msgspec.Struct, kw_only=True):
    """`machine` is that of the first part."""

    command: str
    vnext: str
    machine: dict[str, Any]
    summary: dict[str, Any]
    parts: list[Part]


class Recording:
    """The part that is measured now, at the end of the record in `path`, which is begun or added to; None: nothing is written.
    Raises msgspec.ValidationError for a file that is no such record."""

    def __init__(self, path: Path | None, **fields: Any) -> None:
        """`fields`: those of the part that are known before the run."""
        self._path, self._began_s = path, time.monotonic()
        if path is not None and path.is_file():
            self._record = msgspec.json.decode(path.read_bytes(), type=Record)
        else:
            now = msgspec.to_builtins(machine())
            self._record = Record(command=COMMAND, vnext=__version__, machine=now, summary={}, parts=[])
        measured_at = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        self.part = Part(**fields, measured_at=measured_at, load=os.getloadavg())
        self._record.parts.append(self.part)

    def note(self, load: Load, kills: Sequence[Survived]) -> None:
        """Write what has been found so far."""
        part = self.part
        part.answers_compared, part.tokens, part.survived = load.compared, load.tokens, list(kills)
        part.first_token_p50_s, part.first_token_p95_s = (round(percentile(load.waits_s, share), 3) for share in (0.5, 0.95))
        part.wrong, part.seconds = list(load.wrong), round(time.monotonic() - self._began_s, 1)
        self._write()

    def end(self, logs: int, wrong: Sequence[str]) -> None:
        """The server has ended, and its logs were read."""
        self.part.logs, self.part.wrong = logs, [*self.part.wrong, *wrong]
        self.part.seconds = round(time.monotonic() - self._began_s, 1)
        self._write()

    @property
    def summary(self) -> dict[str, Any]:
        """Of all parts."""
        return summary_of(self._record.parts)

    def _write(self) -> None:
        if self._path is None:
            return
        self._record.summary = self.summary
        written = self._path.with_name(f".{self._path.name}.part")
        written.write_text(json.dumps(msgspec.to_builtins(self._record), indent=1) + "\n")
        written.replace(self._path)


def summary_of(parts: Sequence[Part]) -> dict[str, Any]:
    """Counts, what is wrong, and the streams' pauses, also those of single kills alone, and there the pause of the first stream."""
    kills = [each for part in parts for each in part.survived]
    single = [gap for each in kills if each.moment != "recovery" for gap in each.gaps_s]
    gaps = [gap for each in kills for gap in each.gaps_s]
    first = [min(each.gaps_s) for each in kills if each.moment != "recovery" and each.gaps_s]
    return {
        "kills": len(kills), "moments": Counter(each.moment for each in kills), "kinds": Counter(each.kind for each in kills),
        "answers_compared": sum(part.answers_compared for part in parts), "tokens": sum(part.tokens for part in parts),
        "logs": sum(part.logs or 0 for part in parts), "parts_cut_short": sum(part.logs is None for part in parts),
        "wrong": [sentence for part in parts for sentence in part.wrong], "gap_p50_s": percentile(gaps, 0.5),
        "gap_p95_s": percentile(gaps, 0.95), "gap_max_s": max(gaps, default=0.0), "gap_p50_of_one_kill_s": percentile(single, 0.5),
        "gap_p95_of_one_kill_s": percentile(single, 0.95), "first_stream_p50_of_one_kill_s": percentile(first, 0.5),
    }  # fmt: skip
