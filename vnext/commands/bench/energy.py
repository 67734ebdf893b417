"""Energy: the joules of this machine's processors and GPUs, by their own counters: RAPL's files and NVML.

Owns the meters and their wraps. RAPL counts whole processor packages, other programs included, and wraps within minutes to an
hour: a measurement in which one wraps twice counts too little. NVML counts whole boards.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import msgspec

from vnext.runtime.protocol.settings import SettingsError

POWERCAP = Path("/sys/class/powercap")
NVML = "libnvidia-ml.so.1"
HERE = ("localhost", "127.0.0.1", "::1")
FIGURES = ("cpu_joules", "gpu_joules", "joules_per_output_token")
DONE = 0
NOBODY = "--energy: this machine does not say how much energy it uses"


class Meter(msgspec.Struct, frozen=True):
    """`read` gives the joules of a `kind`, cpu or gpu; behind `range_j` they begin at 0 again, unless it is 0."""

    kind: str
    read: Callable[[], float]
    range_j: float = 0.0


class EnergyWatch:
    """What the meters count from now on."""

    def __init__(self, meters: Sequence[Meter]) -> None:
        self._meters, self._before = meters, [each.read() for each in meters]

    def stop(self, output_tokens: int) -> dict[str, float]:
        """The joules of all of a kind, and those of both for each token; nothing without meters."""
        found = dict[str, float]()
        for meter, before in zip(self._meters, self._before):
            spent = meter.read() - before
            name = f"{meter.kind}_joules"
            found[name] = round(found.get(name, 0.0) + spent + (meter.range_j if spent < 0 else 0.0), 3)
        if found and output_tokens:
            found["joules_per_output_token"] = round(sum(found.values()) / output_tokens, 6)
        return found


def meters(host: str) -> list[Meter]:
    """Those of this machine, which must be the server's. Raises SettingsError where there is none."""
    if host not in HERE:
        raise SettingsError(f"--energy reads this machine's counters, and the server is on {host}: run vnext-bench there.")
    try:
        found = [*_packages(), *_boards()]
    except OSError as error:
        raise SettingsError(f"{NOBODY}: {error.filename} cannot be read ({error.strerror}): run vnext-bench as root.") from error
    if not found:
        raise SettingsError(f"{NOBODY}: {POWERCAP} has no package of RAPL, and {NVML} counts for no GPU: leave it out.")
    return found


def _packages() -> list[Meter]:
    zones = [zone for zone in sorted(POWERCAP.glob("intel-rapl:*")) if (zone / "name").read_text().startswith("package")]
    found = [Meter("cpu", partial(_joules, zone / "energy_uj"), _joules(zone / "max_energy_range_uj")) for zone in zones]
    for each in found:
        each.read()  # only root may
    return found


def _joules(path: Path) -> float:
    return int(path.read_text()) / 1e6


def _boards() -> list[Meter]:
    try:
        nvml = ctypes.CDLL(NVML)
    except OSError:
        return []  # no driver
    count, found = ctypes.c_uint(), list[Meter]()
    if nvml.nvmlInit_v2() != DONE or nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)) != DONE:
        return []
    for number in range(count.value):
        board = ctypes.c_void_p()
        if nvml.nvmlDeviceGetHandleByIndex_v2(number, ctypes.byref(board)) == DONE and _board_joules(nvml, board):
            found.append(Meter("gpu", partial(_board_joules, nvml, board)))
    return found


def _board_joules(nvml: ctypes.CDLL, board: ctypes.c_void_p) -> float:
    """0 for a board that counts none, as those before Volta."""
    millijoules = ctypes.c_ulonglong()
    nvml.nvmlDeviceGetTotalEnergyConsumption(board, ctypes.byref(millijoules))
    return millijoules.value / 1e3
