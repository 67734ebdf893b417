"""Operations launched from C++: the launches of the form in Python, argument for argument, and what is asked and refused.

No kernel runs here: `Recorded` is asked for them in the place of a GPU. What kernels make of such launches is in
test_cuda_operations.py and test_cuda_graphs.py, for both forms.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterator
from itertools import count
from typing import Any

import pytest
import torch
from attention_steps import Options, Range, Shape, attend, in_codes, make_sequences
from host_shim import HostBackend, HostLauncher
from rows_cases import draw
from table_cases import mixed_step

from vnext.kernels.calls import AttentionCall, AttentionStep, RotaryWrite
from vnext.kernels.contracts import ContractError
from vnext.kernels.cuda import attention, backends, compiled, operations, rows
from vnext.kernels.cuda.interface import Arguments, three
from vnext.kernels.cuda.plan import StepPlan
from vnext.kernels.table import cuda_door

BF16, HALF, FLOAT, FP8 = torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn
OPS = torch.ops.vnext_cuda
CPU = torch.device("cpu")
POINTER = ctypes.c_uint64


class Recorded:
    """A backend whose kernels are asked for and launched in both forms, and do nothing.

    A launch is kept as name, macros, grid, block, shared memory and the values of its arguments. A C++ launch has addresses of
    values only: how wide they are is known from a launch of the same kernel by Python.
    """

    def __init__(self) -> None:
        self.asked: list[tuple[Any, ...]] = []
        self.launched: list[tuple[Any, ...]] = []
        self.streams: list[int | None] = []
        self.code, self.refusal = 0, None
        self._kernels: list[tuple[str, backends.Defines]] = []
        self._types: dict[str, list[type]] = {}
        self._launch = HostLauncher.FORM(self.launch)
        self._stream = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int32, ctypes.POINTER(ctypes.c_void_p))(self.stream)

    def kernel(self, source: str, name: str, defines: backends.Defines) -> Callable[..., None]:
        def call(grid: tuple[int, ...], block: tuple[int, ...], arguments: tuple[Any, ...], *, shared_mem: int = 0) -> None:
            values = Arguments(arguments)._values
            self._types[name] = [type(value) for value in values]
            sizes = [*three(grid), *three(block)]
            self.launched.append((name, defines, sizes, shared_mem, [(type(value), value.value) for value in values]))

        def prepare(shared_mem: int) -> tuple[int, int]:
            self.asked.append((name, shared_mem))
            if self.refusal:
                raise self.refusal
            self._kernels.append((name, defines))
            return len(self._kernels), max(shared_mem, 48 * 1024)

        call.prepare = prepare
        return call

    def launch(self, function: int, *rest: int) -> int:
        *sizes, shared_mem, stream, pointers, extra = rest
        name, defines = self._kernels[function - 1]
        types = self._types.get(name, [])
        places = ctypes.cast(pointers, ctypes.POINTER(ctypes.c_void_p))
        values = [(each, ctypes.cast(places[at], ctypes.POINTER(each))[0]) for at, each in enumerate(types)]
        self.launched.append((name, defines, sizes, shared_mem, values))
        self.streams.append(stream)
        assert extra is None
        return self.code

    def stream(self, index: int, to: Any) -> int:
        to[0] = 701 + index
        return 0

    def launcher(self) -> compiled.Launcher:
        return compiled.Launcher(
            compiled.address_of(self._launch), compiled.address_of(self._stream), lambda code: f"code {code} means nothing"
        )

    def seen(self, work: Callable[..., Any], arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        """Launches and results of one operation. New tensors have numbers in the order in which kernels meet them."""
        given = [each for part in arguments for each in (part if isinstance(part, list) else [part])]
        own = {each.data_ptr() for each in given if isinstance(each, torch.Tensor)} | {0}
        self.launched.clear()
        results = work(*arguments)
        results = results if isinstance(results, tuple) else (results,)
        numbers: dict[int, str] = {}
        fresh = (f"new {number}" for number in count(1))

        def called(kind: type, value: Any) -> Any:
            if kind is not POINTER or value in own:
                return value
            if value not in numbers:
                numbers[value] = next(fresh)
            return numbers[value]

        launches = [(*rest, [called(*value) for value in values]) for *rest, values in self.launched]
        filled = [result.count_nonzero().item() for result in results if not launches]
        shapes = [(result.shape, result.stride(), result.dtype, called(POINTER, result.data_ptr())) for result in results]
        return launches, shapes, filled


@pytest.fixture
def recorded(shim: HostBackend) -> Iterator[Recorded]:
    if not compiled.is_built():
        pytest.skip(compiled.describe())
    found = Recorded()
    backends.use("cpu", lambda: found)
    try:
        with compiled.serving("cpu", found.launcher()):
            yield found
    finally:
        backends.use("cpu", lambda: shim)


# ---- launches ----------------------------------------------------------------------------------------------------


def same_launches(recorded: Recorded, name: str, plain: Callable[..., Any], *arguments: Any) -> int:
    """Assert that the operation is launched as its plain form is; how many launches that was."""
    expected = recorded.seen(plain, arguments)
    found = recorded.seen(getattr(OPS, name), arguments)
    assert found == expected, name
    return len(found[0])


@pytest.mark.parametrize("dtype", [FLOAT, BF16, HALF])
def test_rows_are_launched_as_by_the_plain_form(recorded: Recorded, dtype: torch.dtype) -> None:
    """Dense and apart in memory, aligned and not, weights of both widths; no rows and no width launch nothing."""
    apart = draw(4, 1100, dtype=dtype)
    for x in (draw(3, 64, dtype=dtype), apart[:, 3:515], apart[:, 8:1032], draw(2, 6, dtype=dtype), apart[:0, :64]):
        width, one = x.shape[1], int(len(x) > 0)
        for weight in (draw(width, dtype=dtype), draw(width)):
            assert same_launches(recorded, "rms_norm", rows.rms_norm, x, weight, 1e-6) == one
            for residual in (draw(*x.shape, dtype=dtype), draw(len(x), width + 3, dtype=dtype)[:, 1:-2]):
                assert same_launches(recorded, "add_rms_norm", rows.add_rms_norm, x, residual, weight, 1e-5) == one
        for gate in rows.GATES:
            assert same_launches(recorded, "gate_and_mul", rows.gate_and_mul, x, gate) == one
    assert same_launches(recorded, "gate_and_mul", rows.gate_and_mul, apart[:, :0], "silu") == 0


def turned(qkv: torch.Tensor, *given: Any) -> torch.Tensor:
    return rows.rotary_kv_write(qkv, RotaryWrite(*given))


@pytest.mark.parametrize("dtype", [FLOAT, BF16])
def test_rotary_is_launched_as_by_the_plain_form(recorded: Recorded, dtype: torch.dtype) -> None:
    """With norms of both widths and without, a part of a head, no angles, angles apart, fp8 caches and scales, codes, no tokens."""
    wide, angles, slots = draw(7, 5 * 16 + 3, dtype=dtype), draw(7, 12), torch.randperm(20)[:7]
    turn = angles[:, :8].contiguous()
    for qkv, norms, turns, cache, scales in (
        (wide[:, :80], (None, None), (turn, turn), dtype, ()),
        (wide[:, 3:], (draw(16, dtype=dtype), draw(16, seed=1)), (angles[:, :4], angles[:, 4:8]), dtype, ()),
        (wide[:, :80], (None, draw(16, dtype=dtype)), (None, None), FP8, (0.5, 2.0)),
        (wide[:, :80], (None, draw(16, dtype=dtype)), (turn, turn), torch.int8, ()),
    ):
        caches = torch.zeros(2, 5, 1, 4, 17 if cache is torch.int8 else 16).to(cache)
        given = (qkv, *norms, 1e-6, *turns, *caches, slots, *scales)
        assert same_launches(recorded, "rotary_kv_write", turned, *given) == 1
    given = (wide[:0, :80], None, None, 1e-6, turn[:0], turn[:0], *caches, slots[:0])
    assert same_launches(recorded, "rotary_kv_write", turned, *given) == 0


@pytest.fixture
def both_attend(recorded: Recorded, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Every attention of attention_steps.py by both forms, which must launch the same; how many launches each was."""
    plain, counts = attention.paged_attention, []

    def planned(*given: Any) -> torch.Tensor:
        query, *caches, table, tensors, slot_count, is_partial = given[:7]
        return plain(query, table, AttentionCall(*caches, StepPlan(*tensors, slot_count, is_partial), *given[7:]))

    def both(query: torch.Tensor, table: torch.Tensor, call: AttentionCall) -> torch.Tensor:
        *caches, plan = call[:3]
        given = (query, *caches, table, list(plan[:7]), *plan[7:], *call[3:8])
        counts.append(same_launches(recorded, "paged_attention", planned, *given))
        return plain(query, table, call)

    monkeypatch.setattr(attention, "paged_attention", both)
    return counts


@pytest.mark.parametrize(
    ("shape", "dtype"), [(Shape(4, 2, 64, 16), BF16), (Shape(2, 2, 256, 32), HALF), (Shape(40, 2, 16, 16), FLOAT)], ids=str
)
def test_attention_is_launched_as_by_the_plain_form(both_attend: list[int], shape: Shape, dtype: torch.dtype) -> None:
    """Prompts, decodes of one split and of several, a window, a cap, a shared prefix, no query at all, fp8 and scales, codes."""
    sequences = make_sequences([300, 290, 257], shape, dtype, shared=256)
    decodes = [Range(0, 299, 300), Range(1, 289, 290)]
    attend(sequences, [*decodes, Range(2, 0, 257)])
    attend(sequences, decodes, shared=256)
    attend(sequences, [Range(0, 260, 300)], Options(40, 2.0))
    attend(sequences, [Range(1, 20, 20)])
    if dtype is not FLOAT:
        attend(sequences._replace(caches=sequences.caches.to(FP8)), decodes, scales=(0.5, 2.0))
    attend(in_codes(sequences)[0], decodes)
    assert both_attend == [3, 3, 1, 0, *[2] * (1 if dtype is FLOAT else 2)]


@pytest.fixture
def memory_is_filled() -> Iterator[None]:
    """New memory holds NaN: a test sees what nobody has written."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def test_tokens_of_no_row_and_queries_apart_in_memory(recorded: Recorded, both_attend: list[int], memory_is_filled: None) -> None:
    step = mixed_step(CPU, BF16)
    plan = operations.attention_metadata(AttentionStep(step.starts, step.contexts, step.table, 16, 2)).plan(4, 16, 0)
    apart = torch.cat((step.query, step.query[:5])).repeat_interleave(2, 1)[:, ::2]
    assert not apart.is_contiguous()
    attention.paged_attention(apart, step.table, AttentionCall(*step.caches, plan, 0.25))
    assert both_attend == [3]
    assert torch.empty_like(apart).isnan().all()
    result = OPS.paged_attention(apart.contiguous(), *step.caches, step.table, list(plan[:7]), *plan[7:], 0.25, 0, 0.0)
    assert not result.any(), "tokens of no row have no attention, and no kernel is here that would write zeros"


# ---- what is asked, and refused ----------------------------------------------------------------------------------


def test_a_launch_goes_to_the_current_stream(recorded: Recorded) -> None:
    OPS.rms_norm(draw(5, 64), draw(64), 1e-6)
    assert recorded.streams == [700] and recorded.asked == [("rms_norm", 32)]


def test_python_is_asked_once_in_each_thread_and_for_more_shared_memory(recorded: Recorded) -> None:
    step = mixed_step(CPU, BF16)
    plan = operations.attention_metadata(AttentionStep(step.starts, step.contexts, step.table, 16, 2)).plan(4, 16, 0)

    def twice() -> None:
        for _ in range(2):
            OPS.rms_norm(draw(5, 64), draw(64), 1e-6)

    twice()
    other = threading.Thread(target=twice)
    other.start()
    other.join()
    assert len(recorded.asked) == 2 and len(recorded.launched) == 4
    for head_dim, asked in ((16, 4), (256, 6)):
        query, cache = torch.zeros(len(step.query), 4, head_dim), torch.zeros(1, 2, 16, head_dim)
        for _ in range(2):
            OPS.paged_attention(query, cache, cache, step.table, list(plan[:7]), *plan[7:], 0.25, 0, 0.0)
        assert len(recorded.asked) == asked, "the wide units, which come first, ask for the most"
    compiled.leave("cpu")
    compiled.serve("cpu", recorded.launcher())
    twice()
    assert len(recorded.asked) == 7, "what another backend gave is not kept"


def test_what_goes_wrong_is_told_in_its_own_words(recorded: Recorded) -> None:
    x, weight = draw(5, 64), draw(64)
    recorded.refusal = RuntimeError("asked for the first time inside a graph's capture")
    for _ in range(2):
        with pytest.raises(RuntimeError, match="^asked for the first time inside a graph's capture"):
            OPS.rms_norm(x, weight, 1e-6)
    for refusal, reported in (
        (ValueError("tensors are on another GPU"), "ValueError: tensors are on"),
        (MemoryError(), "MemoryError"),
    ):
        recorded.refusal = refusal
        with pytest.raises(RuntimeError, match=reported):
            OPS.rms_norm(x, weight, 1e-6)
    recorded.refusal, recorded.code = None, 719
    with pytest.raises(RuntimeError, match="code 719 means nothing"):
        OPS.rms_norm(x, weight, 1e-6)
    for wrong in (lambda: OPS.gate_and_mul(x, "relu"), lambda: OPS.gate_and_mul(x.double(), "silu")):
        with pytest.raises(RuntimeError, match="not what the operation's contract"):
            wrong()
    with pytest.raises(RuntimeError, match="served already"):
        compiled.serve("cpu", recorded.launcher())


def test_attention_looks_at_its_arguments_and_the_contract_says_what_is_wrong(recorded: Recorded) -> None:
    """Each of what it was not given a plan for is one change of a call that is right."""
    step = mixed_step(CPU)
    metadata = operations.attention_metadata(AttentionStep(step.starts, step.contexts, step.table, 16, 2))
    right = (step.query, *step.caches, metadata, 0.25, 0, 0.0, 1.0, 1.0)
    door = cuda_door(operations.paged_attention, True)
    door(right[0], AttentionCall(*right[1:]))
    narrow, plan = step.caches.to(FP8), metadata.plan(4, 16, 0)
    for place, changed, message in (
        (0, step.query[0], "query must have the shape"), (0, step.query[..., :8], "query must have the shape"),
        (0, step.query.transpose(1, 2).contiguous().transpose(1, 2), "last dimension of query must be dense"),
        (0, step.query[:, :3], "3 query heads cannot share 2"), (1, step.caches[0][0], "key_cache must have the shape"),
        (2, step.caches[1][:, :1], "value_cache must have the shape"), (2, step.caches[1].half(), "value_cache must be"),
        (2, step.caches[1].transpose(2, 3).contiguous().transpose(2, 3), "value_cache"), (4, 0.0, "scale must be above 0"),
        (4, float("nan"), "scale must be above 0"), (5, 7, "but the window is 7"), (6, -1.0, "softcap not below"),
        (7, 2.0, "has no scales"), (8, 0.0, "must be above 0 but are"),
    ):  # fmt: skip
        query, *fields = (*right[:place], changed, *right[place + 1 :])
        with pytest.raises(ContractError, match=message):
            door(query, AttentionCall(*fields))
    for scales in ((0.0, 1.0), (1.0, -2.0)):
        given = (step.query.bfloat16(), *narrow, step.table, list(plan[:7]), *plan[7:], 0.25, 0, 0.0)
        OPS.paged_attention(*given, 0.5, 2.0)
        with pytest.raises(RuntimeError, match="not what the operation's contract"):
            OPS.paged_attention(*given, *scales)
    with pytest.raises(RuntimeError, match="not what the operation's contract"):
        OPS.paged_attention(*right[:3], step.table, list(plan[:6]), *plan[7:], 0.25, 0, 0.0)


def test_without_the_module_python_serves(recorded: Recorded) -> None:
    def broken(name: str) -> None:
        raise ImportError("_native.so: undefined symbol: torch_call_dispatcher\nsecond line")

    with compiled.set_aside("cpu"), pytest.MonkeyPatch.context() as patch:
        patch.setattr("vnext.base.compiled.import_module", broken)
        patch.setitem(compiled.absent, compiled.CUDA_LAUNCHES, "")  # put back afterwards
        module, why = compiled.load()
        patch.setattr(compiled, "_native", module)
        patch.setattr(compiled, "_why_not", why)
        reported = "the extension does not fit this torch (_native.so: undefined symbol: torch_call_dispatcher)"
        assert compiled.describe() == f"from Python: {reported}" and not compiled.is_built()
        compiled.serve_gpu()
        with pytest.raises(RuntimeError, match="does not fit this torch"):
            compiled.serve("cpu", compiled.Launcher(0, 0, str))
        OPS.rms_norm(draw(2, 8), draw(8), 1e-6)
    assert len(recorded.launched) == 1 and recorded.streams == []


def test_a_machine_without_a_driver_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where CuPy and a torch for CUDA are installed, and no driver."""
    if not compiled.is_built() or torch.version.cuda is not None:
        pytest.skip("only where this torch has no CUDA, and there is a module")
    monkeypatch.setattr(compiled, "is_usable", lambda: True)
    monkeypatch.setattr(compiled, "_refused", {})
    compiled.serve_gpu()
    assert ".so" in compiled.describe().removeprefix("from Python: ") and not compiled.serves("cuda")


def test_sizes_of_a_plan_are_as_the_plan_has_them() -> None:
    """operations.cpp numbers the tensors of a plan by hand."""
    assert StepPlan._fields[:7] == ("narrow", "wide", "tiles", "tokens", "limits", "partials", "merges")
    assert compiled.SCALAR_TYPES == (FLOAT, BF16, HALF, FP8, torch.int8)
