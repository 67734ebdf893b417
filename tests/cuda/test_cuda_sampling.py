"""The sampling kernel on the host shim gives the token of torch's form, the oracle, for every row."""

from __future__ import annotations

import ctypes
from pathlib import Path

import pytest
import torch
from host_shim import ORDERS, HostBackend
from planted_bugs import ROWS_READ, Bug, plant
from sampling_cases import NAN, THREADS, Draws, asked, masked, sampled

from vnext.kernels.cpu import native
from vnext.kernels.cuda import backends, sampling
from vnext.sampling.inputs import SamplingInputs
from vnext.sampling.logits import adjust, adjust_rows, keep_allowed
from vnext.sampling.sampling import choose, choose_by_kernel, choose_compiled, draw_by_inversion, keep_allowed_by_kernel
from vnext.state.params import ROW_DTYPES

INFINITY = float("inf")


def assert_same_tokens(logits: torch.Tensor, inputs: SamplingInputs, threads: int = THREADS) -> int:
    expected, spoilt = choose(logits, inputs, draw_by_inversion), torch.ones(len(logits), dtype=torch.bool)
    found = sampled(logits, inputs, threads, spoilt)
    assert torch.equal(spoilt, logits.isnan().any(-1))
    for row in (found != expected).nonzero()[:, 0].tolist():
        raise AssertionError(f"row {row}: {found[row]} for {expected[row]} with {[part[row] for part in inputs.columns()]}")
    return int(((inputs.temperature > 0) & (found != logits.argmax(-1))).sum())


@pytest.mark.parametrize("vocabulary", [1, 7, 128, 1000, 3001])
def test_the_token_is_that_of_the_torch_form(shim: HostBackend, vocabulary: int) -> None:
    draws, drawn = Draws(vocabulary), 0
    for turn, shim.order in enumerate(ORDERS):
        rows = 48 if vocabulary <= 1000 else 16
        drawn += assert_same_tokens(draws.logits(rows, vocabulary), draws.inputs(rows), (32, 128, 256, 64)[turn])
    assert vocabulary < 100 or drawn > 8


def test_every_form_says_which_rows_hold_what_is_no_number(shim: HostBackend) -> None:
    """Wherever in the row it is, and whatever the row asks for; infinities are numbers."""
    draws, rows, vocabulary = Draws(6), 40, 333
    logits, inputs = torch.randn(rows, vocabulary, generator=draws.generator), draws.inputs(rows)
    for row in range(0, rows, 3):
        logits[row, row * 8 :: 70] = NAN
    logits[1], logits[2, 5], logits[4] = -INFINITY, INFINITY, NAN
    for form in (choose, choose_by_kernel, *([choose_compiled] if native.is_built() else [])):
        spoilt = torch.ones(rows, dtype=torch.bool)
        tokens = form(logits, inputs, spoilt=spoilt)
        assert torch.equal(spoilt, logits.isnan().any(-1)) and spoilt.sum() == 15
        assert torch.equal(tokens, form(logits, inputs))
        assert torch.equal(tokens[spoilt], logits.isnan().int().argmax(-1)[spoilt])


def test_a_whole_vocabulary_at_the_product_s_width(shim: HostBackend) -> None:
    draws = Draws(3)
    assert_same_tokens(draws.logits(4, 32_000), draws.inputs(4), 0)


def test_many_tokens_within_a_digit_of_the_edge(shim: HostBackend) -> None:
    """The search for a floor goes digit by digit of the weights: here thousands share the first ones, or all."""
    draws, rows, vocabulary = Draws(5), 8, 4300  # of which fewer find room in shared memory
    spread = draws.pick((1e-7, 1e-6, 1e-4, 1e-2), rows)[:, None]
    near = torch.randn(rows, vocabulary, generator=draws.generator).clamp(-5, 5) * spread
    heavy = near + 12 * (torch.arange(vocabulary) % 100 == 0)
    inputs = draws.inputs(rows)._replace(temperature=torch.ones(rows))
    for logits in (near, heavy, near * 0):
        for top_k in (0, 65, 2999):
            assert_same_tokens(logits, inputs._replace(top_k=torch.full((rows,), top_k)))


def test_rows_apart_in_memory(shim: HostBackend) -> None:
    draws = Draws(9)
    wide, inputs = draws.logits(20, 300), draws.inputs(10)
    for logits in (wide[::2, 100:], wide[:10].T.contiguous().T, wide[:1].expand(10, -1)):
        assert_same_tokens(logits, inputs)
    empty = SamplingInputs(**{name: column[:0] for name, column in zip(ROW_DTYPES, inputs.columns())})
    assert sampled(wide[:0], empty).tolist() == []


LOADING = "__device__ __forceinline__ float4 load_four(const Row &row, int first) {\n"
COUNTED = Bug(
    "loads that count themselves", ROWS_READ, LOADING,
    'extern "C" unsigned long long loaded = 0;\n' + LOADING + "    __atomic_fetch_add(&loaded, 4ull, __ATOMIC_RELAXED);\n",
)  # fmt: skip
PASSES = {
    "greedy": (1, {"temperature": 0.0}), "no filter": (2, {}), "min-p": (2, {"min_p": 0.1}), "top-p": (2, {"top_p": 0.9}),
    "top-k": (2, {"top_k": 50}), "top-k and top-p": (2, {"top_k": 50, "top_p": 0.95}), "all": (2, {"top_k": 9, "top_p": 0.5, "min_p": 0.01}),
}  # fmt: skip


def test_the_logits_are_read_twice(shim: HostBackend, libraries: Path, tmp_path: Path) -> None:
    """At a speed that is the memory's, whatever the filters; more often only where a filter keeps thousands of tokens."""
    backend = HostBackend(libraries, ("-O0",), plant(COUNTED, tmp_path), precompile=True)
    backends.use("cpu", lambda: backend)
    draws, rows, vocabulary = Draws(8), 1, 6144
    logits = torch.randn(rows, vocabulary, generator=draws.generator) * 3
    none = {"temperature": 0.8, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
    try:
        kernel = backend.kernel(sampling.SOURCE, "sample_rows", ())
        loaded = ctypes.c_ulonglong.in_dll(kernel.library, "loaded")
        found = {}
        for name, (_, asked) in [*PASSES.items(), ("flat", (0, {"top_p": 0.99}))]:
            columns = {part: torch.full((rows,), value) for part, value in (none | asked).items()}
            inputs = SamplingInputs(**columns, seed=torch.arange(rows) * 77, position=torch.arange(rows))
            loaded.value = 0
            assert_same_tokens(logits / 1000 if name == "flat" else logits, inputs, 512)
            found[name] = loaded.value / (rows * vocabulary)
    finally:
        backends.use("cpu", lambda: shim)
    assert found.pop("flat") > 3
    assert all(passes - 0.1 < found[name] <= passes for name, (passes, _) in PASSES.items()), found


@pytest.mark.parametrize("vocabulary", [3, 32, 700, 9001])
def test_masks_are_applied_as_by_the_torch_form(shim: HostBackend, vocabulary: int) -> None:
    """In rows apart in memory; what lies between them stays."""
    draws = Draws(vocabulary)
    allowed, logits = masked(draws, 5, vocabulary), torch.randn(5, vocabulary, generator=draws.generator)
    keep_allowed(expected := logits.clone(), allowed)
    assert vocabulary < 30 or not torch.equal(expected, logits)
    for shim.order in ORDERS:
        wide = torch.full((5, vocabulary + 3), 7.0)
        wide[:, :vocabulary] = logits
        keep_allowed_by_kernel(wide[:, :vocabulary], allowed)
        assert torch.equal(wide[:, :vocabulary], expected) and (wide[:, vocabulary:] == 7.0).all()
    sampling.mask_rows(logits, allowed.rows[:0], allowed.masks[:0])
    with pytest.raises(ValueError, match="must be dense"):
        sampling.mask_rows(logits.T, allowed.rows, allowed.masks)


@pytest.mark.parametrize("is_drafted", [False, True], ids=["tokens", "drafts"])
@pytest.mark.parametrize(("vocabulary", "room"), [(700, 4), (9001, 40), (3, 2)])
def test_what_rows_ask_for_is_done_as_by_the_torch_forms(shim: HostBackend, vocabulary: int, room: int, is_drafted: bool) -> None:
    """The kernel, the form of one shape and the form of a step's inputs give the same bits; slices end within a row. Penalties
    count the drafts that a sample follows, and no other's."""
    draws = Draws(4)
    given = asked(draws, vocabulary, room, is_drafted)
    count = len(given.places)
    logits = torch.randn(count, vocabulary, generator=draws.generator) * 5
    logits[0, 1], logits[3, 0] = -INFINITY, -0.0
    expected = adjust(logits, given.inputs)
    assert not torch.equal(expected, logits)
    by_shape = logits.clone()
    adjust_rows(by_shape, given.tables, given.places, given.positions, given.drafts)
    assert torch.equal(by_shape.view(torch.int32), expected.view(torch.int32))
    for shim.order in ORDERS:
        wide = torch.full((count, vocabulary + 3), 7.0)
        wide[:, :vocabulary] = logits
        sampling.adjust_rows(wide[:, :vocabulary], given.places, given.positions, given.tables, given.drafts)
        assert torch.equal(wide[:, :vocabulary].contiguous().view(torch.int32), expected.view(torch.int32))
        assert (wide[:, vocabulary:] == 7.0).all()
    sampling.adjust_rows(logits[:0], given.places[:0], given.positions[:0], given.tables)
    with pytest.raises(ValueError, match="must be dense"):
        sampling.adjust_rows(logits.T, given.places, given.positions, given.tables)
