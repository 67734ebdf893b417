"""Energy: RAPL's files and NVML's functions become joules, and where there are none the command says so before it asks anybody."""

from __future__ import annotations

import ctypes
import json
from pathlib import Path
from typing import Any

import pytest
from test_bench_cli import Backend
from test_bench_serve import served

from vnext.commands.bench import energy
from vnext.commands.bench.energy import EnergyWatch, Meter, meters
from vnext.runtime.protocol.settings import SettingsError


class Nvml:
    """Two boards, of which the second counts nothing; each reading is 5 J after the one before."""

    def __init__(self) -> None:
        self.millijoules = 0

    def nvmlInit_v2(self) -> int:
        return 0

    def nvmlDeviceGetCount_v2(self, count: Any) -> int:
        count._obj.value = 2
        return 0

    def nvmlDeviceGetHandleByIndex_v2(self, number: int, board: Any) -> int:
        board._obj.value = number + 1
        return 0

    def nvmlDeviceGetTotalEnergyConsumption(self, board: ctypes.c_void_p, millijoules: Any) -> int:
        if board.value == 2:
            return 3
        self.millijoules += 5_000
        millijoules._obj.value = self.millijoules
        return 0


def zone(root: Path, name: str, kind: str, microjoules: int) -> Path:
    folder = root / name
    folder.mkdir()
    for file, value in (("name", kind), ("energy_uj", microjoules), ("max_energy_range_uj", 60_000_000)):
        (folder / file).write_text(f"{value}\n")
    return folder


@pytest.fixture
def powercap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    root = tmp_path / "powercap"
    root.mkdir()
    monkeypatch.setattr(energy, "POWERCAP", root)
    monkeypatch.setattr(energy, "NVML", "no such library")
    return root


def test_packages_are_summed_and_a_wrap_is_made_up_for(powercap: Path) -> None:
    first, second = zone(powercap, "intel-rapl:0", "package-0", 10_000_000), zone(powercap, "intel-rapl:1", "package-1", 59_000_000)
    zone(powercap, "intel-rapl:0:0", "core", 1), zone(powercap, "intel-rapl:2", "psys", 1)
    watch = EnergyWatch(meters("127.0.0.1"))
    (first / "energy_uj").write_text("12500000\n")
    (second / "energy_uj").write_text("500000\n")
    assert watch.stop(output_tokens=8) == {"cpu_joules": 4.0, "joules_per_output_token": 0.5}


def test_boards_that_count_are_read(powercap: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda name: Nvml())
    watch = EnergyWatch(meters("localhost"))
    assert watch.stop(output_tokens=0) == {"gpu_joules": 5.0}


def test_where_there_is_none_the_command_says_so(powercap: Path, capsys: pytest.CaptureFixture[str]) -> None:
    backend = Backend()
    assert served(backend, "--energy") == 2 and not backend.bodies
    assert "has no package of RAPL, and no such library counts for no GPU: leave it out" in capsys.readouterr().err
    with pytest.raises(SettingsError, match=r"the server is on gpu7: run vnext-bench there\."):
        meters("gpu7")
    (zone(powercap, "intel-rapl:0", "package-0", 0) / "energy_uj").unlink()
    with pytest.raises(SettingsError, match=r"energy_uj cannot be read \(No such file or directory\): run vnext-bench as root\."):
        meters("::1")


def test_serve_reports_joules_and_holds_them_to_bounds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    readings = iter([100.0, 132.0] * 2)
    monkeypatch.setattr("vnext.commands.bench.serve.meters", lambda host: [Meter("cpu", lambda: next(readings))])
    asked = ["--energy", "--save-result", "--result-dir", str(tmp_path), "--result-filename", "r.json"]
    assert served(Backend(), *asked, "--assert", "joules_per_output_token<=4") == 0
    assert "cpu_joules: 32.0" in capsys.readouterr().out
    assert json.loads((tmp_path / "r.json").read_text())["joules_per_output_token"] == 4.0
    assert served(Backend(), *asked, "--assert", "cpu_joules<32") == 1
    assert served(Backend(), "--assert", "cpu_joules<32") == 2, "without --energy there is no such figure"
