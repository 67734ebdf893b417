"""Schedule: the time at which each request is due. Arithmetic only.

Latencies count from these times: a client's wait begins when it wants an answer, not when the load generator sends the request.
So latencies show a server that cannot keep up, which otherwise only slows down the load (coordinated omission).
"""

from __future__ import annotations

import random
from itertools import accumulate


def intended_s(count: int, rate: float, seed: int) -> list[float]:
    """Seconds after the start, for each of `count` requests: a Poisson process of `rate` a second, stretched so that the last
    request comes after count / rate seconds; all at 0 where `rate` is 0."""
    if not rate:
        return [0.0] * count
    rng = random.Random(seed)
    moments = list(accumulate(rng.expovariate(1.0) for _ in range(count)))
    return [moment * (count / rate) / moments[-1] for moment in moments]
