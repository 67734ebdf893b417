"""What a start says of batch invariance: true of the path that serves, and a refusal where it cannot be had."""

from __future__ import annotations

import os

import pytest

from vnext.runtime.processes.determinism import (
    COMPILED_DTYPES,
    INTEL,
    gpu_invariance,
    has_strict_path,
    invariance,
    mkl_branch,
    prepare_process,
)  # fmt: skip
from vnext.runtime.protocol.settings import SettingsError

DTYPES = ("float32", "bfloat16", "float16")


@pytest.mark.parametrize("asked", [None, True, False])
@pytest.mark.parametrize("dtype", COMPILED_DTYPES)
def test_the_compiled_kernels_are_invariant_whatever_is_asked(asked: bool | None, dtype: str) -> None:
    found = invariance(asked, dtype, compiled=True, strict_mkl=False)
    assert found.holds and found.form == "plain" and str(found).startswith("yes: the compiled kernels")


@pytest.mark.parametrize("compiled", [False, True])
def test_sixteen_bits_in_plain_torch_must_be_asked_for(compiled: bool) -> None:
    """float16 is plain torch's even where the kernels were compiled."""
    usual = invariance(None, "float16", compiled=compiled, strict_mkl=True)
    asked = invariance(True, "float16", compiled=compiled, strict_mkl=True)
    assert not usual.holds and usual.form == "plain" and "--deterministic" in usual.why
    assert asked.holds and asked.form == "wide" and "made in float32" in asked.why


def test_float32_in_plain_torch_needs_no_asking_and_can_be_declined() -> None:
    assert invariance(None, "float32", compiled=False, strict_mkl=True).holds
    assert invariance(None, "float32", compiled=False, strict_mkl=True).form == "plain"
    assert not invariance(False, "float32", compiled=False, strict_mkl=True).holds


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_cannot_be_had_is_refused_and_not_claimed(dtype: str) -> None:
    assert not invariance(None, dtype, compiled=False, strict_mkl=False).holds
    with pytest.raises(SettingsError, match=f"--deterministic needs the compiled kernels .* computes {dtype} without either"):
        invariance(True, dtype, compiled=False, strict_mkl=False)


def test_a_gpu_multiplies_in_one_shape_where_that_is_asked_for() -> None:
    for asked in (None, False):
        assert not gpu_invariance(asked, "int8").holds and gpu_invariance(asked).form == "plain"
    assert gpu_invariance(True).holds and gpu_invariance(True).form == "fixed"
    with pytest.raises(SettingsError, match="does not support int8 weights on a GPU: leave out one of the two"):
        gpu_invariance(True, "int8")


def test_only_some_processors_have_a_strict_path() -> None:
    assert has_strict_path(frozenset({INTEL, "avx2"})) and has_strict_path(frozenset({INTEL, "avx2", "avx512f"}))
    assert not has_strict_path(frozenset({INTEL, "sse4_2"})) and not has_strict_path(frozenset({"AuthenticAMD", "avx512f"}))


def test_the_code_path_is_prescribed_unless_declined(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MKL_CBWR", "OMP_NUM_THREADS", "GOMP_SPINCOUNT", "GLOO_SOCKET_IFNAME"):
        monkeypatch.setenv(name, "before")
    prepare_process(3, prescribe=False)
    assert (os.environ["MKL_CBWR"], os.environ["OMP_NUM_THREADS"]) == ("before", "3")
    monkeypatch.setattr("vnext.runtime.processes.determinism.cpu_flags", lambda: frozenset({INTEL, "avx2"}))
    prepare_process(2)
    assert os.environ["MKL_CBWR"] == mkl_branch(frozenset({INTEL, "avx2"})) == "AVX2,STRICT"
