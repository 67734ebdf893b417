"""`vnext-bench allreduce`: the sum of the ranks' tensors by a library and by our two forms, by size and number of ranks.

On a CPU the library is gloo and ours go over shared memory; between GPUs they are NCCL and the kernels over mapped memory. Ranks
are processes (all_reduce_ranks.py). The switch point is the largest size up to which one-shot is the fastest form.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence

import msgspec
import torch

from vnext.commands.bench.report import Result, progress, runs_table, until_cut
from vnext.commands.bench.server_runs import MeasurementFailed
from vnext.commands.bench.workload import numbers_of
from vnext.options.parser import Given
from vnext.runtime.protocol.settings import SettingsError

KIB, RANKS_MAX, TIMEOUT_S = 1024, 8, 500
LIBRARY, ONE_SHOT, TWO_SHOT = "library", "one_shot", "two_shot"
FORMS = {LIBRARY: "library", ONE_SHOT: "one-shot", TWO_SHOT: "two-shot"}
COLUMNS = {"ranks": "ranks", "kib": "KiB"} | {name: f"{words} us" for name, words in FORMS.items()} | {"gain": "library / best"}
LAST_LINE = -1


def measure(given: Given) -> Result:
    """Every number of ranks, every size. Raises SettingsError, MeasurementFailed."""
    values = given.values
    counts, sizes = numbers_of(values["ranks"], "--ranks", 2, RANKS_MAX), numbers_of(values["sizes"], "--sizes", 1, 2**20)
    device = device_of(values["bench_device"], max(counts))
    runs, notes, figures = list[dict[str, float]](), [], dict[str, float]()
    with until_cut(runs) as cut:
        for count in progress("numbers of ranks", counts):
            found = [line(count, each) for each in timed(count, device, sorted(set(sizes)), values["rounds"])]
            figures[f"switch_kib_{count}"] = switch_kib(found)
            figures |= {f"{name}_us_{count}_{run['kib']}": run[name] for run in found for name in FORMS if name in run}
            notes.append(f"{count} ranks: {winners(found)}")
            runs += found
    shown = "\n".join([runs_table(COLUMNS, runs), *(f"note: {note}" for note in notes)])
    asked = {"device": device, "rounds": values["rounds"], "dtype": "bfloat16"}
    return Result(
        figures=figures, workload=asked, runs=tuple(runs), notes=tuple(notes), shown=shown,
        wrong=cut.wrong(len(notes), len(counts), "numbers of ranks"),
    )  # fmt: skip


def device_of(asked: str, ranks: int) -> str:
    """ "cpu" or "cuda"; auto takes GPUs where there is one for each rank. Raises SettingsError."""
    gpus = torch.cuda.device_count()
    if asked == "cuda" and gpus < ranks:
        raise SettingsError(f"--device is cuda, and here are {gpus} GPUs for {ranks} ranks: give fewer --ranks, or --device cpu.")
    return asked if asked != "auto" else "cuda" if gpus >= ranks else "cpu"


def timed(ranks: int, device: str, sizes: Sequence[int], rounds: int) -> list[dict[str, float]]:
    """Seconds by form, one for each size, as rank 0 saw it. Raises MeasurementFailed where a rank fails."""
    command = [sys.executable, "-P", "-m", "vnext.commands.bench.all_reduce_ranks"]
    with tempfile.TemporaryDirectory(prefix="vnext-bench-") as folder:
        words = [str(ranks), device, folder, str(rounds), *map(str, sizes)]
        started = [
            subprocess.Popen([*command, str(rank), *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE) for rank in range(ranks)
        ]
        try:
            ended = [each.communicate(timeout=TIMEOUT_S) for each in started]
        except subprocess.TimeoutExpired as error:
            raise MeasurementFailed(f"The ranks did not end within {TIMEOUT_S} s: ask for fewer sizes or rounds.") from error
        finally:
            for each in started:
                each.kill()
                each.wait()
    if failed := [heard.decode().splitlines() for each, (_, heard) in zip(started, ended) if each.returncode]:
        raise MeasurementFailed(f"A rank failed: {failed[0][LAST_LINE] if failed[0] else 'it said nothing'}.")
    return [msgspec.json.decode(each, type=dict[str, float]) for each in ended[0][0].splitlines()]


def line(ranks: int, seconds: Mapping[str, float]) -> dict[str, float]:
    """Of one size: microseconds by form, and how many times longer than the best of ours the library takes."""
    found: dict[str, float] = {"ranks": ranks, "kib": int(seconds["kib"])}
    found |= {name: round(1e6 * seconds[name], 2) for name in FORMS if name in seconds}
    best = min(seconds[ONE_SHOT], seconds[TWO_SHOT])
    return found | ({"gain": round(seconds[LIBRARY] / best, 2)} if LIBRARY in seconds else {})


def best_of(run: Mapping[str, float]) -> str:
    """The fastest form."""
    return min((name for name in FORMS if name in run), key=lambda name: run[name])


def switch_kib(runs: Sequence[Mapping[str, float]]) -> float:
    """The largest size up to which one-shot is the fastest; 0 where it is not at the smallest."""
    best = 0.0
    for run in runs:
        if best_of(run) != ONE_SHOT:
            break
        best = run["kib"]
    return best


def winners(runs: Sequence[Mapping[str, float]]) -> str:
    """Which form is the fastest from which size on."""
    names = [best_of(run) for run in runs]
    changes = [place for place, name in enumerate(names) if not place or name != names[place - 1]]
    return "fastest " + ", ".join(f"from {runs[place]['kib']:,} KiB {FORMS[names[place]]}" for place in changes)
