"""Values of sampling parameters, the extremes of each: what random rows of tests draw from."""

from __future__ import annotations

from vnext.state.params import DEFAULTS, PARAMETERS

VALUES = {
    "temperature": (0.0, 1e-40, 1e-5, 0.1, 0.7, 1.0, 1.0, 1.5, 5.0, 1e30),
    "top_k": (0, 0, 0, 1, 2, 50, 200, 3000, 10**9),
    "top_p": (1.0, 1.0, 0.0, 1e-9, 0.5, 0.9, 0.99, 0.999999),
    "min_p": (0.0, 0.0, 0.0, 1.0, 0.05, 1e-6, 1e-11, 1e-20),
}


def values_of(name: str) -> tuple[float, ...]:
    """Of a parameter without values of its own: off, a usual value, a tenth and ten times of that."""
    usual, off = PARAMETERS[name].tried, DEFAULTS[name]
    return VALUES.get(name, (off, off, usual, usual / 10, usual * 10))
