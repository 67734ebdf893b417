"""Handed over: whether what an engine received is what another one handed over. Law H2.

Owns the comparison of two logs, each cut where blocks leave or come: there both fold to the same request. Requests are known by
their prompts and blocks by their names, so both logs must have texts.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from vnext.replay.reading.folding import Folded, fold
from vnext.replay.reading.source import Log, UnusableLog
from vnext.sched.handover import Handed, coming, leaving
from vnext.state.events import BlocksHandedOver, BlocksReceived


class HandedOver(msgspec.Struct, frozen=True, kw_only=True):
    """`requests` had `blocks` from the engines whose logs are in the folders `log`; `difference` says which of these none of them
    handed over, "" for none."""

    log: str
    requests: int
    blocks: int
    difference: str


def handed_over_by(prefills: Sequence[Log], decode: Log) -> HandedOver:
    """Compare what came with what left. Raises UnusableLog for logs without texts."""
    if any(log.header.privacy == "shape" for log in (*prefills, decode)):
        raise UnusableLog("requests are compared by their prompts, which a log without texts has not: record with --log full")
    left = [
        leaving(item.before, item.event)
        for log in prefills
        for item in fold(log)
        if isinstance(item, Folded) and isinstance(item.event, BlocksHandedOver)
    ]
    known, names = {each.request for each in left}, {name for each in left for name in each.names}
    folders = ", ".join(str(log.paths[0].parent) for log in prefills)
    requests = blocks = 0
    for item in fold(decode):
        if not isinstance(item, Folded) or not isinstance(item.event, BlocksReceived):
            continue
        if (came := coming(item.before, item.event)) is None:
            continue
        requests, blocks = requests + 1, blocks + len(came.names)
        if why := _differs(item.number, came, known, names):
            return HandedOver(log=folders, requests=requests, blocks=blocks, difference=why)
    return HandedOver(log=folders, requests=requests, blocks=blocks, difference="")


def _differs(number: int, came: Handed, known: set[tuple[bytes, bytes]], names: set[bytes]) -> str:
    """H2: what is wrong with an event by which blocks come, "" for nothing."""
    if came.request not in known:
        return f"event {number} brings blocks of a prompt of {len(came.prompt) // 4} tokens that no other engine handed over"
    strange = [place for place, name in enumerate(came.names) if name not in names]
    if strange:
        return f"event {number} brings a block, place {strange[0]} of {len(came.names)}, that no other engine handed over"
    return ""
