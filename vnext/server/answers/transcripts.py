"""Transcripts: the tokens that a model writes of a sound as segments with their times, and these in the forms that clients ask for;
which of several answers to one window is its transcript.

A token at or behind `first` is a time, in steps of STEP_S from the beginning of the window that was heard. Source of the rules for
segments, for where the next window begins and for what is heard once more: Whisper's own transcribe.py, and the method's paper
(Radford et al., Robust Speech Recognition via Large-Scale Weak Supervision, 2022, section 4.5).
"""

from __future__ import annotations

import zlib
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import NamedTuple

from vnext.server.answers.writing import Json

STEP_S = 0.02
TEMPERATURES = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)
"""At which a window is heard, until an answer is good."""
BEST_OF = 5
"""Answers at each temperature above the first one, of which the likeliest counts."""
UNLIKELY, REPETITIVE, SILENT, FORGETFUL = -1.0, 2.4, 0.6, 0.5
"""The mean log-probability below which an answer is not good, and how much deflate shortens one that repeats itself; how likely
silence is where an unlikely answer is none; the temperature above which the next window does not get what this one says."""


class Trial(NamedTuple):
    """A model's answer to a window at a temperature. `logprobs`: of the tokens, and of the end behind them where there is one;
    `silence`: how likely nothing is said, None where nobody asked."""

    temperature: float
    tokens: list[int]
    logprobs: list[float]
    compression_ratio: float
    silence: float | None = None

    @property
    def avg_logprob(self) -> float:
        return sum(self.logprobs) / (len(self.tokens) + 1)

    @property
    def is_unlikely(self) -> bool:
        return self.avg_logprob < UNLIKELY

    @property
    def is_good(self) -> bool:
        return not self.is_unlikely and self.compression_ratio <= REPETITIVE

    @property
    def is_silent(self) -> bool:
        return self.is_unlikely and (self.silence or 0.0) > SILENT


def chosen_of(trials: Sequence[Trial]) -> Trial:
    """The transcript of a window, of its trials in their order: the last one where that is good or silence, else the likeliest of
    those that do not repeat themselves, or of all."""
    if trials[-1].is_good or trials[-1].is_silent:
        return trials[-1]
    return max([each for each in trials if each.compression_ratio <= REPETITIVE] or trials, key=lambda each: each.avg_logprob)


def compression_ratio(text: str) -> float:
    """How much shorter deflate makes a text."""
    data = text.strip().encode()
    return len(data) / len(zlib.compress(data))


def without_times(tokens: Sequence[int], logprobs: Sequence[float], first: int) -> tuple[list[int], list[float]]:
    """The texts among an answer's tokens, and the log-probabilities without those of times."""
    kept = [at for at, token in enumerate(tokens) if token < first]
    return [tokens[at] for at in kept], [*(logprobs[at] for at in kept), *logprobs[len(tokens) :]]


class Segment(NamedTuple):
    """Tokens of a text, the first one's place in its window's, and when it was said, in seconds."""

    start_s: float
    end_s: float
    tokens: list[int]
    place: int = 0


class Said(NamedTuple):
    """A segment, its text, and the trial that it is of, whose window begins at `seek` hundredths of a second."""

    segment: Segment
    text: str
    trial: Trial
    seek: int


def segments_of(tokens: Sequence[int], first: int, length_s: float) -> tuple[list[Segment], float]:
    """The segments of a window of `length_s` seconds, and how far in the next one begins, above 0. What takes no time is none."""
    times = [token >= first for token in tokens]
    cuts = [at for at in range(1, len(tokens)) if times[at - 1] and times[at]]
    ends_once = times[-2:] == [False, True]
    if cuts:
        bounds = [0, *cuts, *([len(tokens)] if ends_once else [])]
        on = length_s if ends_once else (tokens[cuts[-1] - 1] - first) * STEP_S
    else:
        bounds, on = [0, len(tokens)], length_s
    found, earliest = list[Segment](), 0.0
    for begin, end in zip(bounds, bounds[1:]):
        if texts := [token for token in tokens[begin:end] if token < first]:
            segment = _segment(tokens[begin:end], texts, first, (earliest, length_s))._replace(place=begin + times[begin])
            found += [segment] if segment.end_s > segment.start_s else []
            earliest = segment.end_s
    on = max(on, earliest)
    return found, min(on, length_s) if on > 0 else length_s


def _segment(run: Sequence[int], texts: list[int], first: int, bounds: tuple[float, float]) -> Segment:
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
    whole, thousandths = divmod(round(seconds * 1000), 1000)
    return f"{whole // 3600:02}:{whole // 60 % 60:02}:{whole % 60:02}{point}{thousandths:03}"


def verbose(task: str, language: str, duration_s: float, heard: Sequence[Said]) -> Json:
    shown = [
        {
            "id": at, "seek": seek, "start": round(segment.start_s, 2), "end": round(segment.end_s, 2), "text": text,
            "tokens": segment.tokens, "temperature": trial.temperature, "avg_logprob": trial.avg_logprob,
            "compression_ratio": trial.compression_ratio, "no_speech_prob": trial.silence or 0.0,
        }
        for at, (segment, text, trial, seek) in enumerate(heard)
    ]  # fmt: skip
    text = "".join(each.text for each in heard).strip()
    return {"task": task, "language": language, "duration": round(duration_s, 2), "text": text, "segments": shown}


async def always() -> None:
    """There is always room."""


class Sent:
    """What a client was sent of a transcript, if it wants it as it comes: no space stands around all of it."""

    def __init__(self, say: Callable[[str], bool] | None = None, room: Callable[[], Awaitable[None]] = always) -> None:
        """Has sent nothing. `say`: sends a text, and returns whether more can be sent before there is `room`."""
        self.room, self.is_live = room, say is not None
        self._say, self._space, self._has_begun = say, "", False

    def text(self, text: str) -> bool:
        """The transcript goes on with it; returns as `say`."""
        words = (whole := self._space + text).rstrip()
        self._space = whole[len(words) :]
        words = words if self._has_begun else words.lstrip()
        self._has_begun = self._has_begun or bool(words)
        return not words or self._say is None or self._say(words)
