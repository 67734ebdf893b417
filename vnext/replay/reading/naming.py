"""Finds a log's request by number, by its name or a part of it, or by its client, cache salt or adapter.

Owns the search, which looks for the name's bytes and decodes only the frames that contain them. In a log without texts
names are keyed hashes. The key lies beside the log's folder (vnext/runtime/record/recorder.py) or where the operator
has put it.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from vnext.base.spelling import reason
from vnext.log import codec, pseudonyms
from vnext.log.log_bytes import impl
from vnext.log.log_plain import RECORD_HEAD
from vnext.log.reading import BAD_FORM
from vnext.replay.reading.folding import first_state
from vnext.replay.reading.source import Log, UnusableLog, contents
from vnext.state.events import RequestArrived

SHOWN = 5
CLIENT_DIGITS_MIN = 4


def request_of(log: Log, asked: str, key_file: Path | None = None) -> int:
    """The number of the request `asked` for by number, by name, by the beginning or any other part of its name, or by its client,
    cache salt or adapter, if one request alone has it.

    Raises UnusableLog if no request or several requests match; for several, the message lists their numbers and names.
    """
    if asked.isdecimal():
        return int(asked)
    if not asked.strip():
        raise UnusableLog("a request is named by its number or name, or a part of it")
    wanted = [asked, *_labels(log, asked, key_file)]
    found = {id_: name for each in wanted for id_, name in _named(log, each)}
    for what, matches in MATCHES.items():
        if matching := {id_: name for id_, name in found.items() if any(matches(name, each) for each in wanted)}:
            return _only(asked, what, matching)
    others: dict[int, str] = {event.id: event.name for event in _arrivals(log) if _has(event, asked)}
    if others:
        return _only(asked, "the client, salt or adapter of", others)
    raise UnusableLog(_no_such(log, asked, key_file))


MATCHES: dict[str, Callable[[str, str], bool]] = {
    "the name of": operator.eq, "the beginning of": str.startswith, "a part of": operator.contains,
}  # fmt: skip


def _only(asked: str, what: str, found: dict[int, str]) -> int:
    """The one request that was found. Raises UnusableLog for several."""
    if len(found) == 1:
        return next(iter(found))
    reported = ", ".join(f"{id_} ({name})" for id_, name in sorted(found.items())[:SHOWN])
    more = f" and {len(found) - SHOWN} more" if len(found) > SHOWN else ""
    whose = "requests" if "client" in what else "requests' names"
    raise UnusableLog(f"{asked} is {what} {len(found)} {whose}: {reported}{more}; give one of these numbers")


def _has(event: RequestArrived, asked: str) -> bool:
    """Whether a request is of this client (the beginning of its number), or has this cache salt or adapter."""
    is_client = len(asked) >= CLIENT_DIGITS_MIN and f"{event.client:016x}".startswith(asked.lower())
    return (bool(event.client) and is_client) or asked in (event.cache_salt, event.sampling.adapter)


def _arrivals(log: Log) -> Iterator[RequestArrived]:
    for item in log.items():
        if isinstance(item, codec.Frame):
            yield from (event for event in item.events if isinstance(event, RequestArrived))


# ---- logs without texts ------------------------------------------------------------------------------------------


def _labels(log: Log, asked: str, key_file: Path | None) -> list[str]:
    """The hashed names that a log without texts uses: for one answer, and for all answers to one API request."""
    if log.header.privacy == "full":
        return []
    key = _key(log, key_file)
    return [pseudonyms.name_label(key, asked), pseudonyms.name_label(key, f"{asked}-0")[:-1]] if key else []


def _key(log: Log, key_file: Path | None) -> bytes:
    """The key that is given, or the one beside the log's folder. Raises UnusableLog if the given key is invalid."""
    path = key_file or _usual_key(log)
    try:
        return bytes.fromhex(path.read_text())
    except (OSError, ValueError) as error:
        if key_file is None:
            return b""
        raise UnusableLog(f"{path} holds no key ({reason(error)}): the engine writes one beside the log's folder") from error


def _usual_key(log: Log) -> Path:
    folder = log.paths[0].parent.resolve()
    return folder.with_name(pseudonyms.name_key_file(folder.name))


def _no_such(log: Log, asked: str, key_file: Path | None) -> str:
    if log.header.privacy == "full":
        return f"no request of this log has a name, client, salt or adapter {asked}: give its number, in order of arrival"
    path = key_file or _usual_key(log)
    if not path.is_file():
        return f"this log has hashes for names, and their key is not at {path}: give it with --key, or the request's number"
    return f"no request of this log is called {asked} under the key {path}: give the whole name, or the request's number"


# ---- the search --------------------------------------------------------------------------------------------------


def _named(log: Log, part: str) -> Iterator[tuple[int, str]]:
    """(number, name) of the requests whose frames contain this text, and of the requests alive where the log begins."""
    yield from ((id_, request.name) for id_, request in first_state(log).requests.items())
    needle = part.encode(errors="replace")
    for data in contents(log.paths):
        for body in _bodies_with(data, needle):
            yield from ((event.id, event.name) for event in body.events if isinstance(event, RequestArrived))


def _bodies_with(data: bytes, needle: bytes) -> Iterator[codec.FrameBody]:
    """The whole frames of a segment that contain these bytes, as far as its records follow each other."""
    at, place = len(codec.MAGIC), data.find(needle)
    while place >= 0 and at + RECORD_HEAD <= len(data):
        end = at + RECORD_HEAD + int.from_bytes(data[at : at + 4], "little")
        if end > place:
            if at > len(codec.MAGIC) and impl.record_end(data, at) == end and (body := _body(data, at, end)) is not None:
                yield body
            place = data.find(needle, end)
        at = end


def _body(data: bytes, at: int, end: int) -> codec.FrameBody | None:
    try:
        return codec.frame_decoder.decode(data[at + RECORD_HEAD + codec.digest_word.size : end])
    except (*BAD_FORM, msgspec.MsgspecError):
        return None
