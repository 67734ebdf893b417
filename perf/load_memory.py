"""Measure loads of checkpoints: `python -m perf.load_memory MODEL ... --json FILE`, for GGUF files and folders.

Each load is a process of its own, from a file in the page cache: weights packed anew, and mapped from a packed file that an
earlier load has left. The clock runs from the open header to the last weight; imports, tokenizer and cache are outside. Memory is
the growth of the process's resident set: `peak` is its maximum during the load and `held` its value at the end; `anonymous` is the
part of `held` that no file backs, so the kernel cannot drop it. Ratios are to the bytes of the weights' files.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

from perf.record import record_of, write_record
from vnext.commands.machine import machine
from vnext.kernels.arrays import host_dtype
from vnext.kernels.format import weight_formats
from vnext.models.config.folder import weight_files
from vnext.models.config.model_config import load_config
from vnext.models.layers.sharding import alone
from vnext.models.loading.kept import Kept
from vnext.models.loading.overlay import gguf_folder
from vnext.models.loading.packed_file import PackedFile
from vnext.models.loading.weights import choose_numbers, load_params
from vnext.runtime.rank.loading import start_threads


def load(model: Path, folder: Path, packed: Path | None, threads: int) -> dict[str, float]:
    """Load a model in this process; `packed` is the folder of packed files."""
    start_threads(threads)
    path = gguf_folder(model, folder) if model.is_file() else model
    config = load_config(path)
    dtype, quantization = choose_numbers("auto", config, "auto", "cpu")
    file = PackedFile(packed, path, {"rank": "0"}) if packed else None
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM begins anew
    before, begun_s = status(), time.perf_counter()
    params = load_params(path, config, alone(), host_dtype(dtype), "cpu", formats=weight_formats(quantization), kept=Kept(packed_file=file))
    seconds, after = time.perf_counter() - begun_s, status()
    assert params is not None
    if file is not None:
        file.write_soon()
        file.close()
    size = sum(each.stat().st_size for each in weight_files(path))
    return {
        "bytes": size, "seconds": seconds, "seconds_a_gb": seconds / size * 1e9, "peak": (after["VmHWM"] - before["VmRSS"]) / size,
        "held": (after["VmRSS"] - before["VmRSS"]) / size, "anonymous": (after["RssAnon"] - before["RssAnon"]) / size,
    }  # fmt: skip


def status() -> dict[str, int]:
    """The process's memory in bytes, by Linux's names."""
    lines = (line.split() for line in Path("/proc/self/status").read_text().splitlines())
    return {words[0][:-1]: int(words[1]) * 1024 for words in lines if words[-1] == "kB"}


def measured(model: Path, threads: int, rounds: int) -> dict[str, dict[str, float]]:
    """The medians of a model's loads by their kind."""
    found: dict[str, list[dict[str, float]]] = {"packed": [], "mapped": []}
    with tempfile.TemporaryDirectory() as folder:
        for number in range(rounds + 1):
            for kind, each in found.items():
                command = [sys.executable, "-m", "perf.load_memory", str(model), "--threads", str(threads), "--folder", folder]
                said = subprocess.run([*command, "--once", kind], stdout=subprocess.PIPE, check=True).stdout
                if number:  # the first round fills the page cache and the packed file
                    each.append(json.loads(said))
    return {kind: {name: round(median(one[name] for one in each), 3) for name in each[0]} for kind, each in found.items()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="+", type=Path)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--once", choices=("packed", "mapped"), help=argparse.SUPPRESS)
    parser.add_argument("--json", type=Path, help="record to write")
    options = parser.parse_args()
    if options.once:
        packed = options.folder / "packed" if options.once == "mapped" else None
        print(json.dumps(load(options.models[0], options.folder / "folders", packed, options.threads)))
        return 0
    before = machine()
    loads = {model.name: measured(model, options.threads, options.rounds) for model in options.models}
    for name, kinds in loads.items():
        print(name, *(f"{kind}: {each}" for kind, each in kinds.items()), sep="\n  ")
    write_record(options.json, record_of(" ".join(["python -m perf.load_memory", *sys.argv[1:]]), before, {"loads": loads}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
