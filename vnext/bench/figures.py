"""Figures: from moments to the numbers of a report. Arithmetic only; times are seconds in, names end in their unit."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

PERCENTS = (50, 90, 99)


class Timeline(msgspec.Struct, frozen=True, kw_only=True):
    """One request of a server: when it was sent, and when each piece of its stream came (seconds of one clock)."""

    sent_s: float
    pieces_s: tuple[float, ...]
    input_tokens: int
    output_tokens: int
    error: str = ""


def spread_ms(values_s: Sequence[float], name: str) -> dict[str, float]:
    """Mean and percentiles in ms as `{name}_mean_ms`, `{name}_p50_ms`, ...; nothing for no values."""
    if len(values_s) == 0:
        return {}
    values_ms = np.asarray(values_s) * 1e3
    figures = {f"{name}_mean_ms": float(values_ms.mean())}
    figures |= {f"{name}_p{percent}_ms": float(np.percentile(values_ms, percent)) for percent in PERCENTS}
    return {key: round(value, 3) for key, value in figures.items()}


def rates(requests: int, input_tokens: int, output_tokens: int, elapsed_s: float) -> dict[str, float]:
    """What was done, and how much of it a second."""
    return {
        "requests": requests,
        "input_tokens": input_tokens,
        "output_tokens": output_tokens,
        "elapsed_s": round(elapsed_s, 3),
        "requests_per_s": round(requests / elapsed_s, 3),
        "output_tokens_per_s": round(output_tokens / elapsed_s, 1),
        "total_tokens_per_s": round((input_tokens + output_tokens) / elapsed_s, 1),
    }


def server_figures(timelines: Sequence[Timeline], elapsed_s: float) -> dict[str, float]:
    """Rates and spreads of what a server's clients saw: time to first token, between pieces, end to end."""
    good = [timeline for timeline in timelines if not timeline.error and timeline.pieces_s]
    figures = rates(len(good), sum(t.input_tokens for t in good), sum(t.output_tokens for t in good), elapsed_s)
    figures["failed"] = len(timelines) - len(good)
    figures |= spread_ms([timeline.pieces_s[0] - timeline.sent_s for timeline in good], "ttft")
    figures |= spread_ms([gap for timeline in good for gap in np.diff(timeline.pieces_s)], "itl")
    figures |= spread_ms([timeline.pieces_s[-1] - timeline.sent_s for timeline in good], "e2e")
    return figures
