"""A router's decisions as bytes: a log of their own, so that each one can be made again from what the router knew.

    file     = "vnextRTE", record(header), record(decision), record(decision), ...
    record   = length u32, CRC32 u32, payload        as in the engine's log (docs/log-format.md); payloads are typed msgpack
    arrays

A decision names no request and holds no text; the key of `consistent_hash` stands in it as a digest. Pure: decision_file.py
writes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import msgspec

from vnext.log import log_bytes
from vnext.log.codec import seal
from vnext.log.log_plain import RECORD_HEAD
from vnext.routing.policies import Arriving, Candidate, route

MAGIC = b"vnextRTE"
SUFFIX = ".vnextroutes"
FORMAT_VERSION = 2
"""2: a decision has the weight of hits (Arriving.hit_weight)."""
NOBODY = -1
KEY_BYTES = 16


class Header(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """`replicas` are the names of the candidates in order, `started_ns` the wall time at which the router started, `index`
    counts the files of one router."""

    format_version: int
    code_version: str
    policy: str
    replicas: tuple[str, ...]
    started_ns: int
    index: int = 0


class Decision(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """One decision: what was to be routed, what was known of each replica, and the place of the one that was chosen
    (NOBODY: none was ready). `time_us` counts from the router's start. `snapshots` are those that each view had taken in,
    which shows where one was renewed."""

    arriving: Arriving
    candidates: tuple[Candidate, ...]
    chosen: int
    time_us: int
    snapshots: tuple[int, ...] = ()


class NoDecisions(ValueError):
    """These bytes are no decisions of a router. One sentence."""


class Read(msgspec.Struct, frozen=True):
    """A file's header, its decisions up to the first bad byte, and why reading ended there: "" at the end of the file."""

    header: Header
    decisions: list[Decision]
    ended: str = ""


_encoder = msgspec.msgpack.Encoder()
_header_decoder = msgspec.msgpack.Decoder(Header)
_decision_decoder = msgspec.msgpack.Decoder(Decision)


def key_digest(key: bytes) -> bytes:
    """What stands for a key in decisions: equal keys stay equal, on every router."""
    return hashlib.blake2b(key, digest_size=KEY_BYTES).digest() if key else b""


def encode_header(header: Header) -> bytes:
    return MAGIC + seal(_encoder.encode(header))


def encode_decision(decision: Decision) -> bytes:
    return seal(_encoder.encode(decision))


def read(data: bytes) -> Read:
    """Raises NoDecisions if the data does not begin with a header."""
    if not data.startswith(MAGIC):
        raise NoDecisions("this is no file of a router's decisions")
    end = log_bytes.impl.record_end(data, len(MAGIC))
    try:
        header = _header_decoder.decode(data[len(MAGIC) + RECORD_HEAD : max(end, 0)])
    except (ValueError, RecursionError) as error:
        raise NoDecisions("the header of a router's decisions is damaged or cut short") from error
    if header.format_version > FORMAT_VERSION:
        raise NoDecisions(f"format {header.format_version} of decisions is newer than {FORMAT_VERSION}: use a newer vnext")
    decisions: list[Decision] = []
    try:
        decisions.extend(_decoded(data, end, decisions))
    except _Ended as ended:
        return Read(header, decisions, str(ended))
    return Read(header, decisions)


class _Ended(Exception):
    """The decisions end before the data does."""


def _decoded(data: bytes, offset: int, found: list[Decision]) -> Iterator[Decision]:
    while offset < len(data):
        end = log_bytes.impl.record_end(data, offset)
        if end <= 0:
            what = "ends inside a record" if end == 0 else "has a record with a wrong checksum"
            raise _Ended(f"the file {what} behind decision {len(found)}: the {len(data) - offset} bytes from there on are ignored")
        try:
            yield _decision_decoder.decode(data[offset + RECORD_HEAD : end])
        except (ValueError, RecursionError) as error:
            raise _Ended(f"a record behind decision {len(found)} has another form ({error})") from error
        offset = end


def decide_again(policy: str, decision: Decision) -> int:
    """The choice of a policy from what this decision knew (NOBODY if no replica was ready). Raises RoutingPolicyError."""
    chosen = route(policy, decision.candidates, decision.arriving)
    return NOBODY if chosen is None else chosen
