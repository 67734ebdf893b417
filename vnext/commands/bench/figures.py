"""Figures: computes the numbers of a report from timestamps. Arithmetic only; inputs are in seconds, names end in their unit."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from vnext.commands.bench.load.generator import Timeline

PERCENTS = (50, 90, 99)


def spread_ms(values_s: Sequence[float], name: str) -> dict[str, float]:
    """Mean and percentiles in ms as `{name}_mean_ms`, `{name}_p50_ms`, ...; nothing for no values."""
    if len(values_s) == 0:
        return {}
    values_ms = np.asarray(values_s) * 1e3
    figures = {f"{name}_mean_ms": float(values_ms.mean())}
    figures |= {f"{name}_p{percent}_ms": float(np.percentile(values_ms, percent)) for percent in PERCENTS}
    return {key: round(value, 3) for key, value in figures.items()}


def rates(requests: int, input_tokens: int, output_tokens: int, elapsed_s: float) -> dict[str, float]:
    """Totals, and the same per second."""
    return {
        "requests": requests,
        "input_tokens": input_tokens,
        "output_tokens": output_tokens,
        "elapsed_s": round(elapsed_s, 3),
        "requests_per_s": round(requests / elapsed_s, 3),
        "output_tokens_per_s": round(output_tokens / elapsed_s, 1),
        "total_tokens_per_s": round((input_tokens + output_tokens) / elapsed_s, 1),
    }


def server_figures(
    timelines: Sequence[Timeline], elapsed_s: float, rate: float = 0.0, begin_s: float = 0.0
) -> dict[str, float]:
    """Rates and spreads as a server's clients see them: time to first token, per token, between tokens, end to end, and the
    delay of sending. `rate` is the intended one, 0 for none, from `begin_s` on."""
    good = [timeline for timeline in timelines if not timeline.error and timeline.pieces]
    figures = rates(len(good), sum(t.input_tokens for t in good), sum(t.output_tokens for t in good), elapsed_s)
    figures["failed"] = len(timelines) - len(good)
    if rate:
        sending_s = max(timeline.sent_s for timeline in timelines) - begin_s
        figures |= {"rate_asked_per_s": rate, "rate_reached_per_s": round(len(timelines) / sending_s, 3)}
    figures |= spread_ms([timeline.ttft_s for timeline in good], "ttft")
    figures |= spread_ms([tpot_s(timeline) for timeline in good if timeline.output_tokens > 1], "tpot")
    figures |= spread_ms([gap for timeline in good for gap in between_tokens_s(timeline)], "itl")
    figures |= spread_ms([gap for timeline in good for gap in np.diff([piece.at_s for piece in timeline.pieces])], "read_gap")
    figures |= spread_ms([timeline.e2e_s for timeline in good], "e2e")
    figures |= spread_ms([timeline.sent_s - timeline.intended_s for timeline in timelines], "unsent")
    return figures


def tpot_s(timeline: Timeline) -> float:
    """Time per output token after the first, as vLLM defines it: one value per request."""
    return (timeline.e2e_s - timeline.ttft_s) / (timeline.output_tokens - 1)


def between_tokens_s(timeline: Timeline) -> list[float]:
    """One value for each token after the first read: n tokens share the gap before them equally. Empty where the server did
    not report how many tokens came when."""
    if any(piece.tokens is None for piece in timeline.pieces):
        return []
    pairs = zip(timeline.pieces, timeline.pieces[1:])
    gaps = [(after.at_s - before.at_s, after.tokens or 0) for before, after in pairs]
    return [gap_s / tokens for gap_s, tokens in gaps for _ in range(tokens)]
