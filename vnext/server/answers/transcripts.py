"""Transcripts: the tokens that a model writes of a sound as segments with their times, and these in the forms that clients ask for.

A token at or behind `first` is a time, in steps of STEP_S from the beginning of the window that was heard. Source of the rules for
segments and for where the next window begins: Whisper's own transcribe.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from vnext.server.answers.writing import Json

STEP_S = 0.02


class Segment(NamedTuple):
    """Tokens of a text and when it was said, in seconds."""

    start_s: float
    end_s: float
    tokens: list[int]


def segments_of(tokens: Sequence[int], first: int, length_s: float) -> tuple[list[Segment], float]:
    """The segments of a window of `length_s` seconds, and how far in the next one begins, above 0."""
    times = [token >= first for token in tokens]
    cuts = [at for at in range(1, len(tokens)) if times[at - 1] and times[at]]
    ends_once = times[-2:] == [False, True]
    if cuts:
        bounds = [0, *cuts, *([len(tokens)] if ends_once else [])]
        runs = [list(tokens[start:end]) for start, end in zip(bounds, bounds[1:])]
        on = length_s if ends_once else (tokens[cuts[-1] - 1] - first) * STEP_S
    else:
        runs, on = [list(tokens)], length_s
    found, earliest = list[Segment](), 0.0
    for run in runs:
        if texts := [token for token in run if token < first]:
            found.append(_segment(run, texts, first, (earliest, length_s)))
            earliest = found[-1].end_s
    on = max(on, earliest)
    return found, min(on, length_s) if on > 0 else length_s


def _segment(run: list[int], texts: list[int], first: int, bounds: tuple[float, float]) -> Segment:
    """Between the times that a run begins and ends with, within `bounds`; the bounds where it has none."""
    start, end = ((run[at] - first) * STEP_S if run[at] >= first else bound for at, bound in zip((0, -1), bounds))
    start = min(max(start, bounds[0]), bounds[1])
    return Segment(start, min(max(end, start), bounds[1]), texts)


def subtitles(segments: Sequence[tuple[float, float, str]], is_vtt: bool) -> str:
    """(start, end, text) as WebVTT, or as SubRip."""
    return "".join(_lines(segments, "." if is_vtt else ",", is_vtt))


def _lines(segments: Sequence[tuple[float, float, str]], point: str, is_vtt: bool) -> Iterator[str]:
    if is_vtt:
        yield "WEBVTT\n\n"
    for number, (start, end, text) in enumerate(segments, 1):
        head = "" if is_vtt else f"{number}\n"
        yield f"{head}{clock(start, point)} --> {clock(end, point)}\n{text.strip().replace('-->', '->')}\n\n"


def clock(seconds: float, point: str) -> str:
    """00:00:00.000"""
    whole, thousandths = divmod(round(seconds * 1000), 1000)
    return f"{whole // 3600:02}:{whole // 60 % 60:02}:{whole % 60:02}{point}{thousandths:03}"


def verbose(task: str, language: str, duration_s: float, segments: Sequence[tuple[Segment, str]]) -> Json:
    """OpenAI's verbose_json."""
    shown = [
        {"id": at, "seek": 0, "start": round(each.start_s, 2), "end": round(each.end_s, 2), "text": text, "tokens": each.tokens}
        for at, (each, text) in enumerate(segments)
    ]
    text = "".join(text for _, text in segments).strip()
    return {"task": task, "language": language, "duration": round(duration_s, 2), "text": text, "segments": shown}
