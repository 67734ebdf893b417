"""The sizes of models whose layers have several streams (layers/streams.py)."""

from __future__ import annotations

import msgspec


class StreamSizes(msgspec.Struct, frozen=True, kw_only=True):
    """Layers of `count` streams, with a narrow pair of `beside` numbers beside attention. `scales_gates`: each has numbers that
    multiply what gates its own inputs."""

    count: int
    beside: int
    scales_gates: bool


class Joined(msgspec.Struct, frozen=True, kw_only=True):
    """Layers of `count` streams, of which attention and MLP read a sum, and to which what they give is added (hyper-connections,
    arXiv 2409.19606). Shares are sigmoids, plus `eps`; `magnitude` multiplies those of what is added."""

    count: int
    eps: float
    magnitude: float
