"""Arrivals: the seconds after the start at which each request is due. Arithmetic only.

Latencies count from these times: a client's wait begins when it wants an answer, not when the load generator sends the request.
So latencies show a server that cannot keep up, which otherwise only slows down the load (coordinated omission).
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import accumulate


def at_once(count: int) -> list[float]:
    """All at the start: what a bound on the requests at a time makes of it is a closed loop."""
    return [0.0] * count


def constant(count: int, rate: float) -> list[float]:
    """`rate` requests a second at equal distances."""
    return [(place + 1) / rate for place in range(count)]


def poisson(count: int, rate: float, seed: int, burstiness: float = 1.0) -> list[float]:
    """Gaps of a gamma distribution with this shape, stretched so that the last request comes after count / rate seconds.

    A burstiness of 1 is a Poisson process; less comes in bursts, more is more even.
    """
    rng = random.Random(seed)
    gaps = (rng.expovariate(1.0) if burstiness == 1 else rng.gammavariate(burstiness, 1 / burstiness) for _ in range(count))
    moments = list(accumulate(gaps))
    return [moment * (count / rate) / moments[-1] for moment in moments]


def recorded(moments_s: Sequence[float], speed: float = 1.0) -> list[float]:
    """Moments of a record, from its first on, `speed` times as fast."""
    return [(moment - moments_s[0]) / speed for moment in moments_s]
