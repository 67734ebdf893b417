"""What it gains to split a layer's row-parallel products so that one part's sum travels while the next is computed.

    python -m perf.overlap [--json FILE] [--rounds N]

Two ranks of one thread: over shared memory, over TCP on loopback, and over loopback slowed by a token bucket (tc's tbf, in a network
namespace of its own). Both directions pass one bucket, so it has twice the rate of the link that it stands for.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from perf.record import parser_of, record_of, write_record
from tests.run.ports import held_port
from vnext.commands.machine import machine

ROOT = Path(__file__).resolve().parent.parent
LINKS = {"shared memory": 0, "TCP on loopback": 0, "TCP at 1 Gbit/s": 1000, "TCP at 0.25 Gbit/s": 250}
"""Megabits a second each way; 0 for all that there is."""
SLOWED = "ip link set lo mtu 9000 up && tc qdisc add dev lo root tbf rate {rate}mbit burst 32kb limit 16mb && "
FORMS = ("product", "sum", "whole", "split")
TIMEOUT_S = 600


def main() -> None:
    """Measure, print the table and write the record."""
    parser = parser_of(__doc__ or "")
    parser.add_argument("--rounds", type=int, default=40)
    options = parser.parse_args()
    before = machine()
    links = {link: {"load": machine().load, "shapes": summaries(asked(link, rate, options.rounds))} for link, rate in LINKS.items()}
    print("\n".join(table(links)))
    given = {"ranks": 2, "threads_each": 1, "dtype": "bfloat16", "rounds": options.rounds, "links": links}
    write_record(options.json, record_of(f"python -m perf.overlap --rounds {options.rounds}", before, given))


def asked(link: str, rate_mbit: int, rounds: int) -> dict[str, Any]:
    """Rank 0's seconds by shape, rows and form."""
    with tempfile.TemporaryDirectory(prefix="vnext-overlap-") as folder:
        form = "memory" if link == "shared memory" else "tcp"
        meeting = f"{folder}/meeting" if form == "memory" else f"127.0.0.1:{held_port()}"
        ranks = [f"{sys.executable} -m perf.overlap_ranks {rank} {form} {meeting} {rounds}" for rank in (1, 0)]
        slowed = SLOWED.format(rate=2 * rate_mbit) if rate_mbit else ""
        command = ["sh", "-c", f"{slowed}{{ {' & '.join(ranks)}; }}"]
        ran = subprocess.run(
            ["unshare", "-rn", *command] if rate_mbit else command, cwd=ROOT, stdout=subprocess.PIPE, timeout=TIMEOUT_S, check=True
        )
    return json.loads(ran.stdout)


def summaries(found: dict[str, Any]) -> dict[str, Any]:
    """By shape and rows: medians in milliseconds, and the ratios of split to whole."""
    return {shape: {rows: summary(forms) for rows, forms in each.items()} for shape, each in found.items()}


def summary(forms: dict[str, list[float]]) -> dict[str, Any]:
    """Of each form the median and the shortest time; the median and the quartiles of the ratios within a round, and the ratio of
    the shortest times, which other programs disturb least."""
    found: dict[str, Any] = {f"{name}_ms": round(1e3 * statistics.median(taken), 3) for name, taken in forms.items()}
    found |= {f"{name}_ms_min": round(1e3 * min(taken), 3) for name, taken in forms.items()}
    if "split" not in forms:
        return found
    ratios = [split / whole for split, whole in zip(forms["split"], forms["whole"])]
    low, median, high = statistics.quantiles(ratios, n=4)
    found |= {"ratio": round(median, 3), "ratio_quartiles": [round(low, 3), round(high, 3)]}
    return found | {"ratio_of_min": round(min(forms["split"]) / min(forms["whole"]), 3)}


def table(links: dict[str, Any]) -> list[str]:
    """The record as a table of Markdown, in milliseconds."""
    heads = ("link", "shape", "rows", "products", "sums", "one after the other", "split", "ratio", "of the shortest")
    lines = [f"| {' | '.join(heads)} |", f"|{'---|' * len(heads)}"]
    for link, found in links.items():
        for shape, by_rows in found["shapes"].items():
            for rows, each in by_rows.items():
                times = [f"{each[f'{name}_ms']:.2f}" if f"{name}_ms" in each else "" for name in FORMS]
                ratios = [f"{each[name]:.2f}" if name in each else "" for name in ("ratio", "ratio_of_min")]
                lines.append(f"| {' | '.join((link, shape, rows, *times, *ratios))} |")
    return lines


if __name__ == "__main__":
    main()
