"""Skimming in plain Python: frames are counted, not decoded. The compiled form is in `_log.c`; tests compare them.

A frame is plain if it holds arrivals with ASCII names, aborts, plans and commits, and nothing was lost before it.
Whatever else it meets it leaves to reading.py: it ends before it.
"""

from __future__ import annotations

from typing import Any, NamedTuple, TypeGuard

import msgspec
import numpy as np

from vnext.log.log_plain import RECORD_HEAD, WIDTH_MAX, WIDTH_MIN, record_end, widen
from vnext.state.params import FIRST_LOGGED_COUNT, LATER_TYPES

ARRIVED, ABORTED, PLANNED, COMMITTED = range(1, 5)  # tags of events.py
REASONS = {"client", "stop", "shutdown", "error"}
DIGEST_SIZE = 8
UINT_MAX, TIME_MAX, SIZE_MAX = 2**64 - 1, 2**63 - 1, 2**31 - 1

_decoder = msgspec.msgpack.Decoder()
_Body = list[Any]  # decoded msgpack; what its fields are is known where `_is_plain` has said so


class Skimmed(NamedTuple):
    """What a run of plain frames holds. `offset` and `next_event` are behind it, `digest` is its last frame's."""

    offset: int
    next_event: int
    digest: int
    frames: int = 0
    plans: int = 0
    preempted: int = 0
    aborts: int = 0
    aborted: int = 0
    rank_digests: int = 0
    commits: int = 0
    arrivals: int = 0


def skim(
    data: bytes | memoryview, offset: int, next_event: int, batches: np.ndarray, prompts: np.ndarray, times: np.ndarray
) -> tuple[int, ...]:
    """Count the plain frames from `offset` on, whose events start with `next_event`: the fields of Skimmed.

    Buffers to be filled: `batches` int32 with the tokens of each commit, `prompts` int32 and `times` int64 with those
    of each arrival. Ends before the first frame that is not plain, that is damaged, or that they have no room for.
    """
    buffers = ((batches, np.int32), (prompts, np.int32), (times, np.int64))
    outs = [np.frombuffer(buffer, dtype=dtype) for buffer, dtype in buffers]
    found = Skimmed(offset, next_event, 0)
    while (read := _counted(data, found)) is not None:
        after, *values = read
        if after.commits > len(outs[0]) or after.arrivals > min(len(outs[1]), len(outs[2])):
            break
        for out, start, some in zip(outs, (found.commits, found.arrivals, found.arrivals), values):
            out[start : start + len(some)] = some
        found = after
    return tuple(found)


def skim_steady(
    data: bytes | memoryview, offset: int, next_event: int, tokens: np.ndarray, counts: np.ndarray, ends: np.ndarray
) -> tuple[int, int, int, int, int, int]:
    """Read the steady frames from `offset` on: a commit and the expected plan each, of steps that follow each other.

    Returns (offset behind, last digest, frames, tokens, step committed and step planned by the first). Buffers to be filled:
    `tokens` int32 of all commits, `counts` int32 with the tokens and `ends` int64 with the end of each frame. Ends as `skim` does.
    """
    outs = [np.frombuffer(buffer, dtype=dtype) for buffer, dtype in ((tokens, np.int32), (counts, np.int32), (ends, np.int64))]
    digest = frames = taken = committed = planned = 0
    while (end := record_end(data, offset)) > 0:
        payload = bytes(data[offset + RECORD_HEAD : end])
        body = _decoded(payload[DIGEST_SIZE:]) if len(payload) >= DIGEST_SIZE else None
        if not (_is_plain(body) and len(body) == 5 and body[0] == next_event + 2 * frames):
            break
        if [event[0] for event in body[1]] != [COMMITTED, PLANNED] or body[1][1][2:] != [[], [], []]:
            break
        steps, sampled = (body[1][0][1], body[1][1][1]), np.frombuffer(widen(body[1][0][2], body[4]), dtype=np.int32)
        committed, planned = (committed, planned) if frames else steps
        if steps != (committed + frames, planned + frames) or frames == min(len(outs[1]), len(outs[2])):
            break
        if len(sampled) > len(outs[0]) - taken:
            break
        outs[0][taken : taken + len(sampled)] = sampled
        outs[1][frames], outs[2][frames] = len(sampled), end
        offset, digest, taken, frames = end, int.from_bytes(payload[:DIGEST_SIZE], "little"), taken + len(sampled), frames + 1
    return offset, digest, frames, taken, committed, planned


def _counted(data: bytes | memoryview, found: Skimmed) -> tuple[Skimmed, list[int], list[int], list[int]] | None:
    """The counts with one frame more, its batches, prompts and times; None if no plain frame follows."""
    end = record_end(data, found.offset)
    payload = bytes(data[found.offset + RECORD_HEAD : max(end, 0)])
    body = _decoded(payload[DIGEST_SIZE:]) if len(payload) >= DIGEST_SIZE else None
    if not _is_plain(body) or body[0] != found.next_event:
        return None
    first_event, events, ranks, _, width = body[:5]
    by_tag = {tag: [event for event in events if event[0] == tag] for tag in (ARRIVED, ABORTED, PLANNED, COMMITTED)}
    batches = [len(event[2]) // width for event in by_tag[COMMITTED]]
    prompts = [len(event[3]) // width for event in by_tag[ARRIVED]]
    return (
        found._replace(
            offset=end,
            next_event=first_event + len(events),
            digest=int.from_bytes(payload[:DIGEST_SIZE], "little"),
            frames=found.frames + 1,
            plans=found.plans + len(by_tag[PLANNED]),
            preempted=found.preempted + sum(len(event[2]) for event in by_tag[PLANNED]),
            aborts=found.aborts + len(by_tag[ABORTED]),
            aborted=found.aborted + sum(len(event[1]) for event in by_tag[ABORTED]),
            rank_digests=found.rank_digests + len(ranks),
            commits=found.commits + len(batches),
            arrivals=found.arrivals + len(prompts),
        ),
        batches,
        prompts,
        [event[6] for event in by_tag[ARRIVED]],
    )


def _decoded(body: bytes) -> object:
    try:
        return _decoder.decode(body)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return None


def _is_plain(body: object) -> TypeGuard[_Body]:
    """Five fields, or seven of which the last is empty (log.FrameBody): earlier versions had a time there."""
    if not (_is_list(body, 5) or (_is_list(body, 7) and _is_uint(body[5]) and body[6] == [])):
        return False
    _, events, ranks, lost, width = body[:5]
    if not (_is_uint(body[0]) and _is_list(events) and _is_uint(width)):
        return False
    if not (WIDTH_MIN <= width <= WIDTH_MAX and _is_uint(lost) and lost == 0 and _are_numbers(ranks, 3)):
        return False
    return all(_is_plain_event(event, width) for event in events)


def _is_plain_event(event: object, width: int) -> bool:
    if not (_is_list(event) and event and _is_uint(event[0])):
        return False
    match event[0], len(event):
        case 1, 8 | 10 | 11:
            return _is_arrival(event, width)
        case 2, 3:
            return _is_list(event[1]) and all(map(_is_uint, event[1])) and _is_ascii(event[2]) and event[2] in REASONS
        case 3, 5:
            step, preempted, changed, admitted = event[1:]
            are_rows = _is_uint(step) and _is_list(preempted) and all(map(_is_uint, preempted))
            return are_rows and _are_numbers(changed, 2) and _are_numbers(admitted, 2)
        case 4, 3:
            return _is_uint(event[1]) and _are_tokens(event[2], width)
    return False


def _is_arrival(event: _Body, width: int) -> bool:
    """An arrival of the first logs, or one with the client's number and maybe its weight behind `generated`, which is empty."""
    _, id_, name, prompt, sampling, priority, time, salt, *later = event
    return (
        (not later or (later[0] == b"" and all(map(_is_uint, later[1:])))) and _is_uint(id_) and _is_ascii(name)
        and _are_tokens(prompt, width) and _is_sampling(sampling)
        and type(priority) is int and _is_uint(time) and time <= TIME_MAX and _is_ascii(salt)
    )  # fmt: skip


def _is_sampling(value: object) -> bool:
    """The fields of the first logs, the numbers and texts that were added later, and no constraint."""
    if not _is_list(value) or not FIRST_LOGGED_COUNT <= len(value) <= FIRST_LOGGED_COUNT + len(LATER_TYPES):
        return False
    seed, max_tokens, temperature, top_k, *floats, biases, logprobs, min_tokens, stops, ignore_eos = value[:FIRST_LOGGED_COUNT]
    later = zip(value[FIRST_LOGGED_COUNT:], LATER_TYPES)
    return (
        all(_is_of(kind, each) for each, kind in later)
        and all(map(_is_uint, (seed, max_tokens, min_tokens))) and type(top_k) is int and type(logprobs) is int
        and all(map(_is_float, (temperature, *floats))) and _is_list(biases) and all(map(_is_bias, biases))
        and _is_list(stops) and all(type(stop) is int for stop in stops) and type(ignore_eos) is bool
    )  # fmt: skip


def _is_of(kind: type, value: object) -> bool:
    if kind is tuple:
        return _are_numbers(value, 2)
    if kind is str:
        return _is_ascii(value)
    return _is_float(value) if kind is float else type(value) is kind


def _is_bias(value: object) -> bool:
    return _is_list(value, 2) and _is_uint(value[0]) and _is_float(value[1])


def _is_float(value: object) -> bool:
    return type(value) in (int, float)


def _is_ascii(value: object) -> TypeGuard[str]:
    return isinstance(value, str) and value.isascii()


def _are_tokens(value: object, width: int) -> bool:
    return isinstance(value, bytes) and len(value) % width == 0 and len(value) <= SIZE_MAX


def _are_numbers(values: object, each: int) -> bool:
    """A list of lists of so many numbers."""
    return _is_list(values) and all(_is_list(value, each) and all(map(_is_uint, value)) for value in values)


def _is_list(value: object, length: int | None = None) -> TypeGuard[_Body]:
    return isinstance(value, list) and (length is None or len(value) == length)


def _is_uint(value: object) -> TypeGuard[int]:
    return type(value) is int and 0 <= value <= UINT_MAX
