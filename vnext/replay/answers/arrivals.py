"""Arrivals as files: what clients asked and when, read from and written to other formats.

Owns the formats. `jsonl` has one request per line with every field of its event except the number, so nothing is lost;
numbers keep their exact values. `mooncake` is the trace format of Mooncake (Qin et al., 2024: timestamp in ms,
input_length, output_length, hash_ids of 512 tokens each): lengths, times and shared prefixes without texts. Reading it
makes up tokens such that prompts share exactly what their hash_ids share. Hash ids are numbered in order of first
mention, as in the published traces. convert.py owns the format `vllm-vcr`, and spans.py what is only read.
"""

from __future__ import annotations

import codecs
import hashlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np

from vnext.base.spelling import reason
from vnext.replay.reading.source import UnusableLog
from vnext.state.events import RequestArrived, RequestId, RequestResumed, pack_tokens, unpack_tokens
from vnext.state.params import SEED_MAX, TOKEN_ID_MAX, Sampling

Format = Literal["jsonl", "mooncake", "vllm-vcr"]
"""What is written; spans.py reads more."""
HASH_BLOCK = 512
NS_PER_MS = 1_000_000
FIRST_TOKEN = 3
"""Made-up tokens begin here, because end tokens are usually below."""
VOCABULARY = 32_000
TOKENS_MAX = 2**22
"""The most tokens of a prompt or an answer: a number in a file must not make us reserve all memory."""
YEARS_NS = 10**17
"""Three years: no trace is longer."""
_DIGITS = 5
"""The number of tokens that encode a block's hash id."""


class Line(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One request in the `jsonl` format. Sampling parameters that differ from their defaults, by name. `generated` are tokens
    that another engine gave it, absent of a request that begins."""

    arrival_ns: int
    prompt: list[int]
    sampling: dict[str, object]
    name: str = ""
    priority: int = 0
    cache_salt: str = ""
    client: int = 0
    weight: int = 1
    generated: list[int] | msgspec.UnsetType = msgspec.UNSET


class MooncakeLine(msgspec.Struct, frozen=True, kw_only=True):
    """One request in Mooncake's format; reading ignores other fields."""

    timestamp: int
    input_length: int
    output_length: int
    hash_ids: list[int]


_sampling_fields = {field.name: field for field in msgspec.structs.fields(Sampling)}
_line_decoder = msgspec.json.Decoder(Line)
_mooncake_decoder = msgspec.json.Decoder(MooncakeLine)


# ---- jsonl -------------------------------------------------------------------------------------------------------


def to_jsonl(arrivals: Iterable[RequestArrived]) -> Iterator[bytes]:
    for event in arrivals:
        brought = unpack_tokens(event.generated).tolist() if isinstance(event, RequestResumed) else msgspec.UNSET
        yield msgspec.json.encode(
            Line(
                arrival_ns=event.arrival_ns, prompt=unpack_tokens(event.prompt).tolist(), name=event.name,
                sampling=_reported_sampling(event.sampling), priority=event.priority, cache_salt=event.cache_salt,
                client=event.client, weight=event.weight, generated=brought,
            )
        )  # fmt: skip


def _reported_sampling(sampling: Sampling) -> dict[str, object]:
    values = {name: getattr(sampling, name) for name in _sampling_fields}
    return {name: value for name, value in values.items() if value != _sampling_fields[name].default}


def from_jsonl(lines: Iterable[bytes]) -> Iterator[RequestArrived]:
    """The requests of such lines, numbered. UnusableLog names the invalid line."""
    for number, line in enumerate(lines):
        try:
            reported = _line_decoder.decode(line)
            given: dict[str, Any] = _require_known(reported.sampling)
            sampling = msgspec.convert(msgspec.structs.astuple(Sampling(**given)), Sampling)
            _require(0 <= sampling.seed <= SEED_MAX, "seed", sampling.seed)
            _require(
                0 < len(reported.prompt) and all(0 <= token <= TOKEN_ID_MAX for token in reported.prompt),
                "prompt",
                reported.prompt[:3],
            )
            brought = reported.generated or []
            _require(all(0 <= token <= TOKEN_ID_MAX for token in brought), "generated", brought[:3])
        except (msgspec.MsgspecError, TypeError, ValueError, RecursionError) as error:
            raise UnusableLog(f"line {number + 1} is no request ({error})") from error
        yield _request(number, reported, sampling)


def _request(number: int, reported: Line, sampling: Sampling) -> RequestArrived:
    fields: dict[str, Any] = dict(
        id=RequestId(number), name=reported.name, prompt=pack_tokens(reported.prompt), sampling=sampling,
        priority=reported.priority, arrival_ns=reported.arrival_ns, cache_salt=reported.cache_salt, client=reported.client,
        weight=reported.weight,
    )  # fmt: skip
    if reported.generated is msgspec.UNSET:
        return RequestArrived(**fields)
    return RequestResumed(**fields | {"generated": pack_tokens(reported.generated)})


def _require_known(sampling: dict[str, object]) -> dict[str, object]:
    unknown = set(sampling) - set(_sampling_fields)
    if unknown:
        raise ValueError(f"there is no sampling parameter {sorted(unknown)[0]!r}")
    return sampling


def _require(condition: bool, name: str, value: object) -> None:
    if not condition:
        raise ValueError(f"{name} is {value}")


# ---- Mooncake ----------------------------------------------------------------------------------------------------


def to_mooncake(arrivals: Iterable[RequestArrived], answers: dict[int, int], began_ns: int) -> Iterator[bytes]:
    """A line for each request, with times since `began_ns`. `answers` has the number of tokens sampled for each
    request; a request without an entry gets its limit."""
    numbers: dict[bytes, int] = {}
    for event in arrivals:
        keys = _prefix_keys(event)
        yield msgspec.json.encode(
            MooncakeLine(
                timestamp=(event.arrival_ns - began_ns) // NS_PER_MS,
                input_length=len(event.prompt) // 4,
                output_length=answers.get(event.id, event.sampling.max_tokens),
                hash_ids=[numbers.setdefault(key, len(numbers)) for key in keys],
            )
        )


def _prefix_keys(event: RequestArrived) -> Iterator[bytes]:
    """A key for each prefix of whole blocks, and for the whole prompt."""
    salt = hashlib.blake2b(event.cache_salt.encode()).digest()  # of fixed length, so that salt and tokens cannot be confused
    running = hashlib.blake2b(salt, digest_size=16)
    for at in range(0, len(event.prompt), 4 * HASH_BLOCK):
        running.update(event.prompt[at : at + 4 * HASH_BLOCK])
        yield running.copy().digest()


def from_mooncake(lines: Iterable[bytes], began_ns: int, vocabulary: int = VOCABULARY) -> Iterator[RequestArrived]:
    """The requests of such lines, with made-up tokens below `vocabulary`; each answer has its recorded length."""
    for number, line in enumerate(lines):
        try:
            reported = _mooncake_decoder.decode(line)
            blocks = -(-reported.input_length // HASH_BLOCK)
            _require(reported.input_length > 0 and reported.output_length > 0, "input_length or output_length", 0)
            _require(len(reported.hash_ids) == blocks, f"of {blocks} blocks hash_ids", reported.hash_ids[:3])
            _require(all(0 <= each < 2**40 for each in reported.hash_ids), "hash_ids", reported.hash_ids[:3])
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            raise UnusableLog(f"line {number + 1} is no request of a Mooncake trace ({error})") from error
        tokens = np.concatenate([spelled(each, HASH_BLOCK, vocabulary) for each in reported.hash_ids])[
            : reported.input_length
        ]
        yield RequestArrived(
            id=RequestId(number), name=f"request-{number}", prompt=pack_tokens(tokens),
            sampling=Sampling(seed=number, max_tokens=reported.output_length, ignore_eos=True), priority=0,
            arrival_ns=began_ns + NS_PER_MS * reported.timestamp,
        )


def spelled(hash_id: int, size: int, vocabulary: int) -> np.ndarray:
    """`size` tokens (int64) unique to a hash id: the id's digits, repeated, so that any part identifies it."""
    base = vocabulary - FIRST_TOKEN
    digits = np.array([hash_id // base**place % base for place in range(_DIGITS)], dtype=np.int64)
    return FIRST_TOKEN + np.resize(digits, size)


# ---- files -------------------------------------------------------------------------------------------------------


def lines_of(path: Path) -> Iterator[bytes]:
    """Yield non-empty lines, one at a time."""
    try:
        with path.open("rb") as file:
            if file.read(len(codecs.BOM_UTF8)) != codecs.BOM_UTF8:  # Windows puts this before UTF-8
                file.seek(0)
            yield from (line for line in file if line.strip())
    except OSError as error:
        raise UnusableLog(f"{path} cannot be read ({reason(error)})") from error
