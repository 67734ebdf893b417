"""Every CUDA source compiles for every architecture that we serve, without a GPU, and within its budget.

Registers, spills and stack frames are the assembler's own words. Skipped where CuPy or NVRTC is not installed.
"""

from __future__ import annotations

import re
from itertools import product
from pathlib import Path
from typing import NamedTuple

import planted_bugs
import pytest

from vnext.kernels.cuda import compiling
from vnext.kernels.cuda.interface import Defines, sources

ARCHITECTURES = ("sm_80", "sm_90", "sm_100")
BF16, HALF, FLOAT, CODE = "__nv_bfloat16", "__half", "float", "signed char"
ENTRY = re.compile(r"Compiling entry function '(\w+)'")
SPILLS = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
REGISTERS = re.compile(r"Used (\d+) registers")


class Use(NamedTuple):
    """What the assembler said of one kernel."""

    registers: int
    stack_bytes: int
    spilled_bytes: int


class Form(NamedTuple):
    """A source with its macros, and the most registers a thread of each kernel may have."""

    source: str
    defines: Defines
    budget: dict[str, int]


ROWS = {"rms_norm": 48, "gate_and_mul": 48, "rotary_kv_write": 48, "gather_rows": 32}


def rows(scalar: str, **more: str) -> Form:
    return Form("rows.cu", (("SCALAR", scalar), *more.items()), ROWS)


def attention(scalar: str, head_dim: int, registers: int, cache: str = "") -> Form:
    defines = (("SCALAR", scalar), ("CACHE", cache or scalar), ("HEAD_DIM", str(head_dim)))
    return Form("paged_attention.cu", defines, {"paged_attention": registers, "merge_splits": 40})


ATTENTION = [
    attention(BF16, 64, 128), attention(BF16, 64, 128, CODE), attention(HALF, 80, 168), attention(BF16, 96, 168), attention(BF16, 128, 224),
    attention(BF16, 128, 224, "__nv_fp8_e4m3"), attention(BF16, 256, 255), attention(BF16, 256, 255, "__nv_fp8_e4m3"),
    attention(FLOAT, 128, 255), attention(BF16, 128, 224, CODE), attention(BF16, 256, 255, CODE),
]  # fmt: skip
EXCHANGE = {"sum_one_shot": 64, "sum_two_shot": 64, "join_ranks": 48}


def exchange(scalar: str, world_size: int) -> Form:
    return Form("all_reduce.cu", (("SCALAR", scalar), ("WORLD", str(world_size))), EXCHANGE)


SAMPLING = Form("sampling.cu", (), {"sample_rows": 64, "mask_rows": 32, "adjust_rows": 40})
THIN = {"thin_down": 144, "thin_up": 96}


def thin(scalar: str) -> Form:
    return Form("thin.cu", (("SCALAR", scalar),), THIN)


def few_bits(scalar: str, number: str, rows: int, registers: int) -> Form:
    return Form("few_bits.cu", (("SCALAR", scalar), ("NUMBER", number), ("ROWS", str(rows))), {"multiply_few_bits": registers})


FEW_BITS = [few_bits(BF16, HALF, 1, 96), few_bits(BF16, HALF, 8, 255), few_bits(HALF, FLOAT, 4, 168)]
EXCHANGES = [exchange(HALF, 2), exchange(FLOAT, 8)]
FORMS = [
    *ATTENTION,
    *EXCHANGES,
    SAMPLING,
    rows(BF16),
    rows(HALF),
    rows(FLOAT),
    rows(BF16, WEIGHT=FLOAT),
    rows(BF16, CACHE="__nv_fp8_e4m3"),
    rows(BF16, CACHE=CODE),
    *map(thin, (BF16, HALF, FLOAT)),
    *FEW_BITS,
]
TEST_FORMS = [
    attention(BF16, 16, 128), attention(FLOAT, 16, 128), attention(BF16, 64, 128, "__nv_fp8_e4m3"),
    *(few_bits(*each, 255) for each in product((BF16, HALF), (HALF, FLOAT), (1, 2, 4, 8))),
]  # fmt: skip
"""What only tests ask for: compiled by the check on a GPU before it runs them."""
TYPICAL = [*ATTENTION[4:], exchange(BF16, 8), SAMPLING, rows(BF16), rows(BF16, CACHE=CODE), thin(BF16), FEW_BITS[1]]
CASES = [*((form, "sm_90") for form in FORMS), *((form, arch) for form in TYPICAL for arch in ("sm_80", "sm_100"))]


def name_of(form: Form) -> str:
    return "-".join((form.source, *(value for _, value in form.defines)))


def installed() -> bool:
    try:
        from cupy.cuda import nvrtc  # noqa: F401

        compiling.toolkit_headers()
    except (ImportError, compiling.CompileError):
        return False
    return True


needs_nvrtc = pytest.mark.skipif(
    not installed(), reason='no NVRTC here: pip install -e ".[cuda-test]" brings the compiler of the CUDA sources'
)


def uses(log: str) -> dict[str, Use]:
    """Kernel by kernel what a compilation's log says."""
    found = {}
    for part in log.split("Compiling entry function")[1:]:
        (name,) = ENTRY.findall("Compiling entry function" + part)
        stack, stores, loads = map(int, SPILLS.findall(part)[0])
        found[name] = Use(int(REGISTERS.findall(part)[0]), stack, stores + loads)
    return found


@needs_nvrtc
@pytest.mark.parametrize(("form", "arch"), CASES, ids=lambda part: part if isinstance(part, str) else name_of(part))
def test_a_source_compiles_within_its_budget(form: Form, arch: str) -> None:
    compiled = compiling.compile_source(form.source, form.defines, arch)
    assert compiled.cubin.startswith(b"\x7fELF")
    found = uses(compiled.log)
    assert set(found) == set(form.budget)
    for name, use in found.items():
        assert use.registers <= form.budget[name], (name, use)
        assert (use.spilled_bytes, use.stack_bytes) == (0, 0), (name, use)


def test_every_source_passes_the_gate() -> None:
    for arch in ARCHITECTURES:
        assert {form.source for form, its in CASES if its == arch} == {path.name for path in sources().glob("*.cu")}


@needs_nvrtc
def test_a_mistake_is_told_in_the_compilers_words(tmp_path: Path) -> None:
    (tmp_path / "wrong.cu").write_text('extern "C" __global__ void wrong() { undeclared(); }\n')
    with pytest.raises(compiling.CompileError, match='wrong.cu for sm_90:(.|\n)*"undeclared" is undefined'):
        compiling.compile_source("wrong.cu", (), "sm_90", tmp_path)


@needs_nvrtc
def test_what_was_compiled_is_kept_by_what_went_into_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    defines = (("SCALAR", HALF),)
    cubin = compiling.cached_cubin("rows.cu", defines, "sm_90", tmp_path)
    with monkeypatch.context() as patched:
        patched.setattr(compiling, "compile_source", None)
        assert compiling.cached_cubin("rows.cu", defines, "sm_90", tmp_path) == cubin
    assert compiling.cached_cubin("rows.cu", (), "sm_90", tmp_path) != cubin
    names = [path.name for path in tmp_path.iterdir()]
    assert len(names) == 2 and all(name.endswith(".cubin") for name in names)


def test_every_planted_bug_has_its_text_once() -> None:
    """The hunt for them takes some of them a run: a source that has changed must not leave one behind."""
    lists = [bugs for name, bugs in vars(planted_bugs).items() if name.endswith("_BUGS")]
    found = {bug.name: (sources() / bug.file).read_text().count(bug.right) for bugs in lists for bug in bugs}
    assert len(found) > 40 and {name: count for name, count in found.items() if count != 1} == {}
