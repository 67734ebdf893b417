"""Reports: from the figures of all rounds to medians, ratios, a table and a record. Arithmetic and text only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from perf.peers.workloads import ROWS

# Figures of one row: engine -> all runs.
Runs = Mapping[str, Sequence[float]]
FIRST_COLUMN = 39
COLUMN = 15


def summary(runs: Sequence[float]) -> dict[str, Any]:
    """The median is the figure; the others tell how steady it was."""
    rounded = [float(f"{value:.5g}") for value in runs]
    return {"median": float(f"{median(runs):.5g}"), "min": min(rounded), "max": max(rounded), "runs": rounded}


def ratios(row: str, runs: Runs, base: str) -> dict[str, float]:
    """How many times better `base` is than each other engine, by medians: above 1 is better, for seconds and MB too."""
    ours = median(runs[base])
    better = {engine: ours / median(values) for engine, values in runs.items() if engine != base}
    return {engine: round(value if ROWS[row].larger_is_better else 1 / value, 3) for engine, value in better.items()}


def agreement(first_tokens: Mapping[str, Sequence[int]], reference: str) -> dict[str, float]:
    """Share of prompts to which an engine's first token is the reference's; engines that report none are left out."""
    expected = first_tokens[reference]
    return {
        engine: round(sum(a == b for a, b in zip(tokens, expected)) / len(expected), 3)
        for engine, tokens in first_tokens.items()
        if engine != reference and min(tokens) >= 0
    }


def table(rows: Mapping[str, Runs], base: str, limits: Mapping[str, Any]) -> str:
    """Lines of medians, one for each row, the ratios to their right, the machine's bounds below."""
    engines = list(dict.fromkeys(engine for runs in rows.values() for engine in runs))
    others = [engine for engine in engines if engine != base]
    heads = [*engines, *(f"/{engine}" for engine in others)]
    lines = ["".ljust(FIRST_COLUMN) + "".join(head.rjust(COLUMN) for head in heads)]
    for name, runs in rows.items():
        better = ratios(name, runs, base) if base in runs else {}
        cells = [plain(median(runs[engine])) if engine in runs else "-" for engine in engines]
        cells += [f"{better[engine]:.2f}x" if engine in better else "-" for engine in others]
        first = f"{ROWS[name].words}, {ROWS[name].unit}".ljust(FIRST_COLUMN)
        lines.append(first + "".join(cell.rjust(COLUMN) for cell in cells))
    return "\n".join([*lines, *bounds(rows, engines, limits)])


def plain(value: float) -> str:
    """Three digits or more, no exponents."""
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


def bounds(rows: Mapping[str, Runs], engines: Sequence[str], limits: Mapping[str, Any]) -> list[str]:
    """Shares of what the machine allows: weights read for each decoded token, products for each prompt token."""
    lines = []
    for name in ("decode", "prefill"):
        bound = limits.get(f"{name}_bound_tokens_per_s")
        if name in rows and bound:
            runs = rows[name]
            shares = [f"{median(runs[engine]) / bound:.0%}" if engine in runs else "-" for engine in engines]
            first = f"{name}, of {bound:,.0f} tokens/s".ljust(FIRST_COLUMN)
            lines.append(first + "".join(share.rjust(COLUMN) for share in shares))
    if limits and "gemm_tflops" not in limits:
        lines.append(f"machine: reads {limits['read_gb_per_s']} GB/s, {limits['bytes_per_decoded_token'] / 1e6:,.1f} MB a token")
    elif limits:
        gemm = limits["gemm_tflops"]["layer"]
        lines.append(f"machine: reads {limits['read_gb_per_s']} GB/s, multiplies {gemm} TFLOP/s ({limits['gemm_dtype']}, 512 rows)")
        given = f"{limits['new_memory_gb_per_s']} GB/s, taken again at {limits['memory_again_gb_per_s']}"
        bound = limits["prefill_to_new_memory_bound_tokens_per_s"]
        lines.append(f"new memory is given at {given}; with a bfloat16 cache in it prefill is bound by {bound:,.0f} tokens/s")
    return lines
