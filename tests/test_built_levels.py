"""Levels that a build leaves out, because the processor that it was made on lacks them: what runs elsewhere, and that they compile."""

from __future__ import annotations

import ctypes
import runpy
import shutil
import subprocess
from pathlib import Path

import pytest
import setuptools

from vnext.base.compiled import ROOT
from vnext.commands.doctor import warnings
from vnext.commands.machine import machine
from vnext.kernels.cpu import native
from vnext.models.layers.sharding import alone
from vnext.runtime.protocol.settings import RankSettings
from vnext.runtime.rank.loading import load_runner

SOURCES = ROOT / "vnext" / "kernels" / "cpu" / "src"
COMPILER = shutil.which("g++") or ""
TABLES = ("portable", "avx2", "avx512", "avx512_bf16", "amx")
CODES = ("portable", "avx2", "avx_vnni", "avx512_vnni")
ASKED = """
namespace vnx {
extern "C" {
int best() { return best_level(); }
int highest() { return machine_level(); }
int current() { return current_level(); }
int has(int level) { return has_level(level); }
int set(int level) { return set_level(level); }
int complete() { return is_complete(); }
int64_t code_rows() { return codes_kernels().narrow.block_rows; }
}
}
"""
needs_x86 = pytest.mark.skipif(
    not COMPILER or not native.is_built() or native.best_level() < native.Level.AVX2 or native.best_level() > native.Level.AMX,
    reason="no g++ here, or a processor without AVX2",
)


def settings_of(rank: int) -> RankSettings:
    return RankSettings(
        rank=rank, world_size=1, ring="", results_address="", rendezvous="", model_path=str(ROOT / "vnext" / "demo_model"), dtype="auto",
        quantization="auto", deterministic=None, device="cpu", threads=1, block_size=16, kv_cache_bytes=0,
    )  # fmt: skip


def compiled(folder: Path, *tables: str) -> ctypes.CDLL:
    """levels.cpp with these tables, which hold no functions; the number of rows of a table of codes is its place in CODES."""
    lines = ['#include "kernels.h"', "namespace vnx {"]
    lines += [f"extern const Kernels {name}_kernels = {{}};" for name in TABLES if name in tables]
    lines += [f"extern const CodesKernels {name}_codes = {{{CODES.index(name)}}};" for name in CODES if f"{name} codes" in tables]
    (folder / "tables.cpp").write_text("\n".join([*lines, "}", ASKED]))
    made = folder / f"levels{len([*folder.iterdir()])}.so"
    command = [COMPILER, "-shared", "-fPIC", "-O1", "-std=c++17", "-I", SOURCES, "-o", made, folder / "tables.cpp"]
    subprocess.run([*command, SOURCES / "isa" / "levels.cpp"], check=True)
    return ctypes.CDLL(str(made))


@needs_x86
def test_the_best_of_the_levels_that_were_built_serves(tmp_path: Path) -> None:
    everything = (*TABLES, *(f"{name} codes" for name in CODES))
    whole, plain = compiled(tmp_path, *everything), compiled(tmp_path, "portable", "portable codes")
    narrow = compiled(tmp_path, "portable", "portable codes", "avx2", "avx2 codes")
    assert whole.complete() and whole.best() == whole.highest()
    assert (plain.best(), plain.current(), plain.complete(), plain.code_rows()) == (native.Level.PORTABLE, native.Level.PORTABLE, 0, 0)
    assert not plain.has(native.Level.AVX2) and not plain.set(native.Level.AVX2) and plain.highest() == whole.highest()
    assert (narrow.best(), narrow.current(), narrow.code_rows()) == (native.Level.AVX2, native.Level.AVX2, CODES.index("avx2"))
    assert bool(narrow.complete()) == (whole.highest() == native.Level.AVX2 and whole.code_rows() == CODES.index("avx2"))


@needs_x86
def test_products_of_codes_may_lack_alone(tmp_path: Path) -> None:
    """A processor of the same level, but without its dot products of int8."""
    lesser = compiled(tmp_path, *TABLES, "portable codes", "avx2 codes")
    whole = compiled(tmp_path, *TABLES, *(f"{name} codes" for name in CODES))
    assert lesser.best() == whole.best() and lesser.code_rows() == CODES.index("avx2")
    assert bool(lesser.complete()) == (whole.code_rows() == CODES.index("avx2"))


@pytest.mark.skipif(not native.is_built(), reason="the CPU kernels were not compiled here")
def test_a_build_for_less_says_so(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Once by `vnext doctor`, and once by the first rank."""
    assert native.why_incomplete() == ""
    monkeypatch.setattr(native.kernels, "is_complete", lambda: False)
    sentence = native.why_incomplete()
    assert sentence.startswith("The CPU kernels were built for a processor with fewer instructions") and "pip install -e ." in sentence
    assert sentence in warnings(machine(), 0)
    for rank in (0, 1):
        load_runner(settings_of(rank), "cpu", alone())
    assert [each for each in caplog.messages if each == sentence] == [sentence]


@needs_x86
def test_levels_that_are_left_out_here_compile(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(setuptools, "setup", lambda **given: None)
    made = runpy.run_path(str(root / "setup.py"))
    for name, flags in made["X86_FLAGS"].items():
        if not made["runs_here"](flags):
            command = [COMPILER, "-fsyntax-only", "-Werror", *made["CPU_FLAGS"], *flags, "-I", SOURCES, SOURCES / "isa" / name]
            subprocess.run(command, check=True)
