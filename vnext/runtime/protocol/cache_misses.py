"""What clients and metrics learn of prompts that the prefix cache had less of than earlier prompts share with them."""

from __future__ import annotations

from typing import Literal

import msgspec

MissReason = Literal["evicted", "computing", "incomplete", "salt", "adapter", "weights", "changed"]
"""Blocks have left the cache, are being computed still, or stand there without what goes with them (a snapshot of a state, pages of
other windows); the client's earlier prompt had another salt, adapter or version of the weights; or the prompt departs from an
earlier one."""


class CacheMiss(msgspec.Struct, frozen=True, array_like=True):
    """Why `lost_tokens` of a prompt, in whole blocks, are computed again. `at_token` is the first of them or, of a prompt that has
    `changed`, where it departs from the earlier one, which may lie inside a block. Behind another `salt` all blocks count."""

    reason: MissReason
    at_token: int
    lost_tokens: int


class CacheLosses(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """Lost tokens since the start, for each reason."""

    evicted: int = 0
    computing: int = 0
    incomplete: int = 0
    salt: int = 0
    adapter: int = 0
    weights: int = 0
    changed: int = 0
