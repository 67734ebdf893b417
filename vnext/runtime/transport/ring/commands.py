"""Commands: what every rank is asked to do between two steps and answers (RankAnswer). Typed messages beside the ring's events."""

from __future__ import annotations

import msgspec


class Command(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """Base of all commands. `serial` counts them."""

    serial: int


class CheckWeights(Command, tag=111, frozen=True):
    """Check the files of an update beside running steps; the value is the digest of the weights with it. A `partial` one stays over
    those in `base`, "" for the checkpoint's own. The first rank writes the index of the weights to the file `index`, if any. With
    `is_piece` the update is not complete, and has no digest."""

    paths: tuple[str, ...]
    partial: bool = False
    base: str = ""
    index: str = ""
    is_piece: bool = False


class Release(Command, tag=112, frozen=True):
    """Give back the memory of these parts, "weights" and "kv_cache"."""

    tags: tuple[str, ...]


class Restore(Command, tag=113, frozen=True):
    """Fill the weights from their files again; `path` and `digest` are those of the last change, "" for the checkpoint's own."""

    path: str
    digest: str


class CallFunction(Command, tag=114, frozen=True):
    """Call a registered function (rank/weights.py)."""

    function: str
    arguments: dict[str, str | int | float | bool | None]


AnyCommand = CheckWeights | Release | Restore | CallFunction
