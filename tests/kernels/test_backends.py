"""Backends are chosen by their tables alone, and what the tables say is so."""

from __future__ import annotations

import re
from importlib import import_module
from pathlib import Path
from typing import get_args

import msgspec
import pytest
import torch

from vnext.kernels import backends, table
from vnext.kernels.attention_backends import ATTENTION_BACKENDS
from vnext.kernels.backends import BACKENDS, backend_for
from vnext.runtime.protocol.settings import AttentionName, GpuSettings
from vnext.sampling import sampling

ROOT = Path(__file__).parents[2]
# Files that ask whether kernels are there, with the reason.
ASKING = {
    "vnext/kernels/backends.py",  # the table
    "vnext/kernels/batch_index.py",  # Numba's kernels, when one is asked for
    "vnext/kernels/cpu/native.py",  # what the table asks
    "vnext/kernels/cpu/packed.py",  # which dtypes and heads the compiled kernels serve
    "vnext/kernels/cuda/backends.py",  # what the table asks
    "vnext/kernels/cuda/compiled.py",  # how the CUDA kernels are launched
    "vnext/kernels/cuda/flashinfer.py",  # an attention backend
    "vnext/runtime/rank/weights.py",  # notes their calls
    "vnext/runtime/rank/loading.py",  # starts their threads
    "vnext/runtime/rank/their_images.py",  # chooses the numbers of a foreign tower
    "vnext/sampling/host.py",  # holds their columns to its own
    "vnext/commands/doctor.py",  # says what there is
    "vnext/runtime/transport/collectives/choose_collectives.py",  # sums over ranks, which have a table of their own
    "vnext/replay/rerun/machine.py",  # computes by another machine's kernels
    "vnext/replay/rerun/shard.py",
}


def test_nothing_else_asks_what_is_installed() -> None:
    asked = re.compile(r"native\.is_built\(|is_usable\(\)|find_spec\(\"(cupy|numba|flashinfer)")
    found = {path.relative_to(ROOT).as_posix() for path in (ROOT / "vnext").rglob("*.py") if asked.search(path.read_text())}
    assert found <= ASKING


def test_every_backend_has_entries_and_the_later_goes_first() -> None:
    assert [*table.ENTRIES] == [*BACKENDS] and [*BACKENDS][0] == "reference"
    for row in table.rows():
        names = [name for name, each in BACKENDS.items() if row.device_type in each.serves and not each.why_not()]
        offering = [name for name in names if any(entry.row[:2] == row[:2] for entry in table.ENTRIES[name]())]
        assert row.implementation == offering[-1]


@pytest.mark.parametrize("built", [True, False])
@pytest.mark.parametrize("usable", [True, False])
def test_what_computes_on_a_kind_of_device(monkeypatch: pytest.MonkeyPatch, built: bool, usable: bool) -> None:
    monkeypatch.setattr(backends.native, "is_built", lambda: built)
    monkeypatch.setattr(backends.cuda, "is_usable", lambda: usable)
    assert backend_for("cpu").name == ("compiled" if built else "reference")
    assert backend_for("cuda").name == ("cuda" if usable else "reference")
    assert sampling.sampler_for("cpu") is (sampling.choose_compiled if built else sampling.choose)
    assert sampling.sampler_for("cuda") is (sampling.choose_by_kernel if usable else sampling.choose)
    assert sampling.logits_processor_for("cuda") is (sampling.adjust_by_kernel if usable else sampling.adjust_rows)
    assert sampling.masking_for("cuda") is (sampling.keep_allowed_by_kernel if usable else sampling.keep_allowed)
    assert sampling.masking_for("cpu") is (sampling.keep_allowed_compiled if built else sampling.keep_allowed)
    assert backend_for("cuda").can_capture is usable and not backend_for("cpu").can_capture


def test_attention_is_asked_for_by_the_names_of_the_table() -> None:
    assert get_args(AttentionName) == tuple(ATTENTION_BACKENDS) and GpuSettings().attention == [*ATTENTION_BACKENDS][0]
    with pytest.raises(msgspec.ValidationError, match="attention"):
        msgspec.convert({"attention": "other"}, GpuSettings)


@pytest.mark.parametrize("name", [each.name for each in ATTENTION_BACKENDS.values() if each.module])
def test_an_attention_backend_is_a_module_with_three_functions(name: str) -> None:
    module = import_module(ATTENTION_BACKENDS[name].module)
    assert callable(module.attention_metadata) and callable(module.paged_attention)
    assert "float64" in module.why_not(torch.float64, 64) or "installed" in module.why_not(torch.float64, 64)
