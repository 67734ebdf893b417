"""Figures of a served load by the names of `vllm bench serve`, so that its readers and scripts find them.

The definitions are vLLM's but for one: times count from when a request was due, not from when it was sent. Without a rate the two
are the same.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate

import msgspec
import numpy as np

from vnext.commands.bench.figures import between_tokens_s, tpot_s
from vnext.commands.bench.load.generator import Timeline
from vnext.runtime.protocol.settings import SettingsError

METRICS = {
    "ttft": "Time to First Token", "tpot": "Time per Output Token (excl. 1st token)", "itl": "Inter-token Latency",
    "e2el": "End-to-end Latency",
}  # fmt: skip
Interval = tuple[float | None, float | None]
Value = float | int | str | None | list[int] | list[float] | list[str] | list[list[float]]


class Wanted(msgspec.Struct, frozen=True, kw_only=True):
    """Which metrics have percentiles, which percentiles, and the bounds in ms of a good request by metric."""

    metrics: tuple[str, ...] = ("ttft", "tpot", "itl")
    percentiles: tuple[float, ...] = (99.0,)
    goodput: Mapping[str, float] = {}


def wanted_of(metrics: str, percentiles: str, goodput: Sequence[str]) -> Wanted:
    """From the options' texts. Raises SettingsError."""
    names = tuple(name.strip() for name in metrics.split(",") if name.strip())
    if unknown := [name for name in names if name not in METRICS]:
        raise SettingsError(f"--percentile-metrics has {unknown[0]!r}: choose from {', '.join(METRICS)}.")
    try:
        shares = tuple(float(each) for each in percentiles.split(","))
    except ValueError:
        shares = (-1.0,)
    if not all(0 <= each <= 100 for each in shares):
        raise SettingsError(f"--metric-percentiles is {percentiles!r}: write numbers from 0 to 100, as 50,99.")
    return Wanted(metrics=names, percentiles=shares, goodput=dict(_bound(each) for each in goodput))


def _bound(text: str) -> tuple[str, float]:
    name, _, bound = text.partition(":")
    try:
        if name in ("ttft", "tpot", "e2el") and float(bound) >= 0:
            return name, float(bound)
    except ValueError:
        pass
    raise SettingsError(f"--goodput has {text!r}: write ttft, tpot or e2el with milliseconds, as ttft:500.")


def result_of(timelines: Sequence[Timeline], elapsed_s: float, wanted: Wanted) -> dict[str, Value]:
    """vLLM's members that describe what was measured, without the lists of single requests."""
    good = [each for each in timelines if not each.error and each.pieces]
    read, written = sum(each.input_tokens for each in good), sum(each.output_tokens for each in good)
    values = {name: of(good) for name, of in VALUES_S.items()}
    found: dict[str, Value] = {
        "duration": elapsed_s, "completed": len(good), "failed": len(timelines) - len(good),
        "total_input_tokens": read, "total_output_tokens": written, "request_throughput": len(good) / elapsed_s,
        "request_goodput": sum(is_good(each, wanted.goodput) for each in good) / elapsed_s if wanted.goodput else None,
        "output_throughput": written / elapsed_s, "total_token_throughput": (read + written) / elapsed_s,
        "max_output_tokens_per_s": tokens_per_s_max(good), "max_concurrent_requests": concurrent_max(timelines),
    }  # fmt: skip
    for name, seconds in values.items():
        if name in wanted.metrics:
            found |= spread(name, 1e3 * np.asarray(seconds or [0.0]), wanted.percentiles)
    return found


def spread(name: str, values_ms: np.ndarray, percentiles: Sequence[float]) -> dict[str, Value]:
    """vLLM's names of a metric's mean, median, deviation and percentiles."""
    found: dict[str, Value] = {
        f"mean_{name}_ms": float(values_ms.mean()), f"median_{name}_ms": float(np.median(values_ms)),
        f"std_{name}_ms": float(values_ms.std()),
    }  # fmt: skip
    return found | {f"p{share:g}_{name}_ms": float(np.percentile(values_ms, share)) for share in percentiles}


def intervals_of(timelines: Sequence[Timeline], wanted: Wanted) -> dict[str, Interval]:
    """The bounds in ms, by 95 %, of the medians and percentiles of `result_of`, by their names there."""
    good, found = [each for each in timelines if not each.error and each.pieces], dict[str, Interval]()
    for name in wanted.metrics:
        arrays = [1e3 * np.asarray(VALUES_S[name]([each]), float) for each in good]
        if arrays := [each for each in arrays if len(each)]:
            shares = {"median": 50.0} | {f"p{share:g}": share for share in wanted.percentiles}
            found |= {f"{kind}_{name}_ms": interval(arrays, share) for kind, share in shares.items()}
    return found


def interval_lines(found: Mapping[str, Interval]) -> list[str]:
    """A line for each metric."""
    shown: dict[str, list[str]] = {}
    for key, (low, high) in found.items():
        kind, name, _ = key.split("_")
        known = [f"{each:,.2f}" for each in (low, high) if each is not None]
        word = "" if len(known) == 2 else "above " if low is not None else "below "
        shown.setdefault(name, []).append(f"{kind.title()} {word + ' to '.join(known) if known else 'unknown, of too few'}")
    return [f"95 % intervals of {name.upper()} (ms): {'; '.join(parts)}" for name, parts in shown.items()]


VALUES_S: dict[str, Callable[[list[Timeline]], list[float]]] = {
    "ttft": lambda good: [each.ttft_s for each in good],
    "tpot": lambda good: [tpot_s(each) for each in good if each.output_tokens > 1],
    "itl": lambda good: [gap for each in good for gap in gaps_s(each)],
    "e2el": lambda good: [each.e2e_s for each in good],
}


def gaps_s(timeline: Timeline) -> list[float]:
    """The times between tokens; between reads where the server does not say how many tokens came when."""
    return between_tokens_s(timeline) or [float(gap) for gap in np.diff([piece.at_s for piece in timeline.pieces])]


def is_good(timeline: Timeline, goodput: Mapping[str, float]) -> bool:
    """Whether a request keeps all bounds."""
    tpot = tpot_s(timeline) if timeline.output_tokens > 1 else 0.0
    took_s = {"ttft": timeline.ttft_s, "tpot": tpot, "e2el": timeline.e2e_s}
    return all(1e3 * took_s[name] <= bound for name, bound in goodput.items())


def concurrent_max(timelines: Sequence[Timeline]) -> int:
    """The most requests that were under way at once."""
    changes = sorted([(each.sent_s, 1) for each in timelines] + [(each.ended_s, -1) for each in timelines])
    return max(accumulate(change for _, change in changes), default=0)


def tokens_per_s_max(good: Sequence[Timeline]) -> float:
    """The most tokens that came within one second, counted from the first read."""
    pieces = [(piece.at_s, piece.tokens or 1) for each in good for piece in each.pieces]
    if not pieces:
        return 0.0
    times, counts = np.asarray([at_s for at_s, _ in pieces]), [count for _, count in pieces]
    return float(np.bincount((times - times.min()).astype(int), counts).max())


def details_of(timelines: Sequence[Timeline]) -> dict[str, Value]:
    """vLLM's lists of --save-detailed, in the order of the requests."""
    return {
        "input_lens": [each.input_tokens for each in timelines],
        "output_lens": [each.output_tokens for each in timelines],
        "ttfts": [each.ttft_s if each.pieces else 0.0 for each in timelines],
        "itls": [gaps_s(each) for each in timelines],
        "generated_texts": [each.text for each in timelines],
        "errors": [each.error for each in timelines],
    }


def table(result: Mapping[str, Value], wanted: Wanted) -> str:
    lines = [_row(words, result[name]) for name, words in ROWS.items() if result.get(name) is not None]
    for name in wanted.metrics:
        lines.append(f"{METRICS[name]:-^50}")
        lines += [_row(f"{kind.title()} {name.upper()} (ms):", result[f"{kind}_{name}_ms"]) for kind in ("mean", "median")]
        lines += [_row(f"P{share:g} {name.upper()} (ms):", result[f"p{share:g}_{name}_ms"]) for share in wanted.percentiles]
    return "\n".join([f"{' Serving Benchmark Result ':=^50}", *lines, "=" * 50])


def _row(words: str, value: Value) -> str:
    return f"{words:<40} {value:<10.2f}" if isinstance(value, float) else f"{words:<40} {value:<10}"


ROWS = {
    "completed": "Successful requests:",
    "failed": "Failed requests:",
    "max_concurrency": "Maximum request concurrency:",
    "request_rate": "Request rate configured (RPS):",
    "duration": "Benchmark duration (s):",
    "total_input_tokens": "Total input tokens:",
    "total_output_tokens": "Total generated tokens:",
    "request_throughput": "Request throughput (req/s):",
    "request_goodput": "Request goodput (req/s):",
    "output_throughput": "Output token throughput (tok/s):",
    "max_output_tokens_per_s": "Peak output token throughput (tok/s):",
    "max_concurrent_requests": "Peak concurrent requests:",
    "total_token_throughput": "Total token throughput (tok/s):",
}


# ---- confidence intervals of percentiles -------------------------------------------------------------------------
# The order statistics between which the true percentile lies with a given probability. Of n values so many lie below it as heads
# fall in n throws of a coin (H. A. David, Order Statistics, ch. 7). The times between tokens of one answer are alike and say less
# than as many of different answers: n is divided by the design effect, by how much more the share below the percentile varies
# from answer to answer than it would by chance (Kish, 1965; Woodruff, 1952).

CONFIDENCE = 0.95
COUNT_MAX = 20_000
"""More values than these count as these: an interval is then narrower than any other doubt about a measurement."""


def interval(values: Sequence[np.ndarray], percent: float) -> tuple[float | None, float | None]:
    """The bounds of a percentile of all values (float64[n], one array for each independent request), in their unit. None where
    there are too few values for a bound, as above the 99th percentile of a hundred."""
    merged, share = np.sort(np.concatenate(values)), percent / 100
    count = min(int(len(merged) / design_effect(values, float(np.percentile(merged, percent)))), COUNT_MAX)
    low, high = ranks(count, share)
    places = (np.ceil(np.array([low, high]) / count * len(merged)).astype(int) - 1).tolist()
    return float(merged[places[0]]) if low >= 1 else None, float(merged[places[1]]) if high <= count else None


def design_effect(values: Sequence[np.ndarray], at: float) -> float:
    """By how much more the share of values up to `at` varies from request to request than that of independent ones; at least 1."""
    sizes = np.array([len(each) for each in values])
    below = np.array([np.count_nonzero(each <= at) for each in values])
    count, share = sizes.sum(), below.sum() / sizes.sum()
    if len(values) < 2 or not 0 < share < 1:
        return 1.0
    varied = np.square(below - share * sizes).sum() / count**2 * len(values) / (len(values) - 1)
    return max(1.0, min(float(varied / (share * (1 - share) / count)), float(sizes.mean())))


def ranks(count: int, share: float) -> tuple[int, int]:
    """The ranks, from 1, of the order statistics around the share; 0 and count + 1 where there is none."""
    if not 0 < share < 1 or count < 1:
        return 0, count + 1
    heads = np.arange(count + 1)
    factorials = np.concatenate([[0.0], np.cumsum(np.log(np.arange(1, count + 1)))])
    chances = factorials[count] - factorials - factorials[::-1] + heads * np.log(share) + (count - heads) * np.log(1 - share)
    up_to = np.cumsum(np.exp(chances))
    outside = (1 - CONFIDENCE) / 2
    return int(np.searchsorted(up_to, outside, side="right")), int(np.searchsorted(up_to, 1 - outside)) + 1
