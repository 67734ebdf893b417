"""Continued: whether a log goes on where the log that it continues ended.

Owns the comparison of the tokens that requests brought with those that the older log gave them. Requests are known by their
names, so both logs must have texts.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from vnext.log.codec import Frame
from vnext.replay.reading.folding import Folded, fold
from vnext.replay.reading.source import Log, UnusableLog, open_log
from vnext.state.events import EngineRecovered, RequestArrived, RequestResumed, generated_by, pack_tokens, unpack_tokens
from vnext.state.outputs import outputs


class Continued(msgspec.Struct, frozen=True, kw_only=True):
    """`requests` came back from `log` with `tokens`, all of which it gave them; `unlogged` had come too late to be in it.
    `difference` says where this is not so."""

    log: str
    requests: int
    tokens: int
    unlogged: int
    difference: str


def continued(log: Log) -> Continued:
    """Compare a log with the one that it continues. Raises UnusableLog if there is none, or none with texts."""
    before = _log_before(log)
    if "shape" in (log.header.privacy, before.header.privacy):
        raise UnusableLog("requests come back under their names, and a log without texts has a hash of them, new with each start")
    given = _given(before)
    requests = tokens = unlogged = 0
    for event in _resumed(log):
        requests, tokens = requests + 1, tokens + len(event.generated) // 4
        if event.name not in given and not event.generated:
            unlogged += 1
        elif why := _differs(event, given.get(event.name)):
            return Continued(log=_folder(before), requests=requests, tokens=tokens, unlogged=unlogged, difference=why)
    return Continued(log=_folder(before), requests=requests, tokens=tokens, unlogged=unlogged, difference="")


def _folder(log: Log) -> str:
    return str(log.paths[0].parent)


def _log_before(log: Log) -> Log:
    """The log that this one continues: where it says, or beside this one if both were moved."""
    frame = next((item for item in log.items() if isinstance(item, Frame)), None)
    begun = frame.events[0] if frame is not None and frame.first_event == 1 and frame.events else None
    if not isinstance(begun, EngineRecovered) or not begun.log:
        raise UnusableLog(f"{_folder(log)} continues no other log, or has lost its first segment, which names it")
    named = Path(begun.log)
    for folder in (named, log.paths[0].parent.parent / named.name):
        if folder.is_dir():
            return open_log(folder)
    raise UnusableLog(f"{_folder(log)} continues {named}, which is not there: put that folder beside this one")


def _given(log: Log) -> dict[str, tuple[bytes, bytes]]:
    """The prompt of each request of a log, and its tokens, those that it brought from a still older log first."""
    prompts: dict[str, bytes] = {}
    tokens: dict[str, list[int]] = {}
    for item in fold(log):
        if not isinstance(item, Folded):
            continue
        if isinstance(item.event, RequestArrived):
            prompts[item.event.name] = item.event.prompt
            tokens[item.event.name] = unpack_tokens(generated_by(item.event)).tolist()
        for output in outputs(item.before, item.event, item.after):
            if output.token >= 0 and output.name in tokens:
                tokens[output.name].append(output.token)
    return {name: (prompt, pack_tokens(tokens[name])) for name, prompt in prompts.items()}


def _resumed(log: Log) -> list[RequestResumed]:
    frames = (item for item in log.items() if isinstance(item, Frame))
    return [event for frame in frames for event in frame.events if isinstance(event, RequestResumed)]


def _differs(event: RequestResumed, given: tuple[bytes, bytes] | None) -> str:
    """What a request says of its past that the older log does not, in one sentence; "" for nothing."""
    who, count = f"request {event.id} ({event.name})", len(event.generated) // 4
    if given is None:
        return f"{who} brought {count} tokens, and the older log does not know it"
    prompt, tokens = given
    if event.prompt != prompt:
        return f"{who} has another prompt than in the older log"
    if not tokens.startswith(event.generated):
        return f"{who} brought {count} tokens that the older log did not give it: it has {len(tokens) // 4}"
    return ""
