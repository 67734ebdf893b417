"""Faults planted into the kernels are found by the checks that the kernels pass."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import torch
from attention_steps import Options, Range, Sequences, Shape, attend, check, in_codes, in_fp8, make_sequences
from device_ranks import LIMITS, RankBackend, run_threads, wrong_sums
from host_shim import ORDERS, STRAGGLING, HostBackend, KernelError
from planted_bugs import (
    ATTENTION_BUGS,
    CODE_BUGS,
    EXCHANGE_BUGS,
    FEW_BITS_BUGS,
    FP8_BUGS,
    GROUP_BUGS,
    ROW_BUGS,
    SAMPLING_BUGS,
    THIN_BUGS,
    Bug,
    plant,
)
from rows_cases import adapters, device, draw, tiles_of, weight
from sampling_cases import Draws, asked, masked, sampled

from vnext.kernels import few_bits, mxint8, references, thin_tiles
from vnext.kernels.calls import RotaryWrite
from vnext.kernels.cuda import backends, rows, sampling, thin
from vnext.runtime.transport.collectives.device_group import DeviceGroup
from vnext.runtime.transport.collectives.errors import RankLost
from vnext.sampling.logits import adjust, keep_allowed
from vnext.sampling.sampling import choose, draw_by_inversion

SHAPE = Shape(4, 2, 64, 16)
SEQUENCES = make_sequences([330, 70], SHAPE, torch.bfloat16)


@pytest.fixture
def backend(shim: HostBackend, request: pytest.FixtureRequest, libraries: Path, tmp_path: Path) -> Iterator[HostBackend]:
    """The sources with a bug, or as they are (None), at -O0."""
    folder = None if request.param is None else plant(request.param, tmp_path)
    made = RankBackend(libraries, ("-O0",), folder, precompile=True)
    backends.use("cpu", lambda: made)
    yield made
    backends.use("cpu", lambda: shim)


def attention_is_right(backend: HostBackend) -> bool:
    """Prompts of four warps over two splits, a decode by partial sums, a window; in every order."""
    try:
        for backend.order in ORDERS:
            for given in ([Range(0, 270, 330), Range(1, 69, 70)], [Range(0, 329, 330)]):
                for found, one in zip(attend(SEQUENCES, given), given, strict=True):
                    check(found, SEQUENCES, one)
        window = Options(window=20)
        check(attend(SEQUENCES, [Range(1, 60, 70)], window)[0], SEQUENCES, Range(1, 60, 70), window)
    except (AssertionError, KernelError):
        return False
    return True


def groups_are_right(backend: HostBackend) -> bool:
    """A chunk behind two groups of splits, walked by one unit, cut into groups and into splits, and a decode: the same bits, in two orders."""
    sequences = make_sequences([8230], Shape(2, 1, 16, 16), torch.bfloat16)
    one = Range(0, 8200, 8230)
    try:
        for backend.order in ORDERS[:2]:
            (whole,) = attend(sequences, [one])
            check(whole, sequences, one)
            if not all(torch.equal(whole, attend(sequences, [one], units_wanted=wanted)[0]) for wanted in (1, 2)):
                return False
            if not torch.equal(whole[-1:], attend(sequences, [Range(0, 8229, 8230)])[0]):
                return False
    except (AssertionError, KernelError):
        return False
    return True


def rows_are_right(backend: HostBackend) -> bool:
    """Norms and turns, in every order."""
    x, weight = draw(3, 900, dtype=torch.bfloat16), draw(900, dtype=torch.bfloat16, seed=1)
    qkv, angles, slots = draw(5, 5 * 80), draw(5, 40), torch.arange(5)
    caches, expected_caches = torch.zeros(2, 2, 2, 1, 5, 80)
    expected = references.rms_norm(x, weight, 1e-6)
    turn = (angles.cos(), angles.sin())
    turned = references.rotary_kv_write(qkv.clone(), RotaryWrite(None, None, 1e-6, *turn, *expected_caches, slots))
    for backend.order in ORDERS:
        normed = rows.rms_norm(x, weight, 1e-6)
        if (normed != expected).float().mean() > 0.002:  # another order of the sum moves a rounding now and then
            return False
        if not torch.equal(rows.rotary_kv_write(qkv, RotaryWrite(None, None, 1e-6, *turn, *caches, slots)), turned):
            return False
    return torch.equal(caches, expected_caches)


def codes_are_right(backend: HostBackend) -> bool:
    """Rows of a cache byte for byte, then a prompt of four warps and a decode from them, in every order."""
    numbers, slots = draw(5, 3 * 64), torch.arange(5)
    numbers[0], numbers[1, ::3] = 1.9999, 0
    caches, expected_caches = torch.zeros(2, 2, 1, 1, 5, mxint8.packed_width(64), dtype=torch.int8)
    references.rotary_kv_write(numbers.clone(), RotaryWrite(None, None, 1e-6, None, None, *expected_caches, slots))
    coded, exact = in_codes(SEQUENCES)
    for backend.order in ORDERS:
        rows.rotary_kv_write(numbers, RotaryWrite(None, None, 1e-6, None, None, *caches, slots))
        if not torch.equal(caches, expected_caches):
            return False
        if not stand_for(coded, exact):
            return False
    return True


def fp8_is_right(backend: HostBackend) -> bool:
    """A prompt of four warps and a decode from fp8, in every order."""
    given = in_fp8(SEQUENCES)
    for backend.order in ORDERS:
        if not stand_for(*given):
            return False
    return True


def stand_for(narrow: Sequences, exact: Sequences) -> bool:
    """Whether both caches give the same bits."""
    try:
        for given in ([Range(0, 270, 330), Range(1, 69, 70)], [Range(0, 329, 330)]):
            if not all(map(torch.equal, attend(narrow, given), attend(exact, given))):
                return False
    except KernelError:
        return False
    return True


def tokens_are_right(backend: HostBackend) -> bool:
    """Rows with equals at their top, filters of all kinds, and totals as small as targets; what rows ask for beside."""
    draws, wishes = Draws(11), asked(Draws(2), 300, 130, is_drafted=True)
    plain = torch.randn(len(wishes.places), 300, generator=draws.generator)
    expected, allowed = adjust(plain, wishes.inputs), masked(draws, 5, 300)
    keep_allowed(may_come := plain.clone(), allowed)
    for backend.order in ORDERS:
        sampling.adjust_rows(changed := plain.clone(), wishes.places, wishes.positions, wishes.tables, wishes.drafts)
        if not torch.equal(changed, expected):
            return False
        sampling.mask_rows(bound := plain.clone(), allowed.rows, allowed.masks)
        if not torch.equal(bound, may_come):
            return False
        logits, inputs = draws.logits(40, 300), draws.inputs(40)
        logits[:10] = logits[:10].clamp(max=0.0)
        few = inputs._replace(temperature=torch.full((40,), 1e-5), top_k=torch.full((40,), 3))
        flat, most = torch.randn(8, 1024, generator=draws.generator) * 0.3, draws.inputs(8)
        most = most._replace(temperature=torch.ones(8), top_k=torch.zeros(8, dtype=torch.int64), top_p=torch.full((8,), 0.99))
        greedy = inputs._replace(temperature=inputs.temperature * 0)
        for given, chosen in ((logits, inputs), (logits, greedy), (logits, few), (flat, most)):
            spoilt = torch.zeros(len(given), dtype=torch.bool)
            if not torch.equal(sampled(given, chosen, 64, spoilt), choose(given, chosen, draw_by_inversion)):
                return False
            if not torch.equal(spoilt, given.isnan().any(-1)):
                return False
    return True


def thin_products_are_right(backend: HostBackend) -> bool:
    """Two tiles of one adapter and one of another, two segments and two lines, in every order."""
    given, tiles = adapters(600, (40, 20), [[5, 3], [0, 16]], torch.float32, first=1), tiles_of([(0, range(10)), (1, [11])])
    x, product = draw(12, 600), draw(12, given.columns, seed=1)
    expected = thin_tiles.add_tiled(product.clone(), x, given.memory, *tiles, given.lines)
    for backend.order in ORDERS:
        found = product.clone()
        try:
            thin.add_tiled(found, x, given.memory, *tiles, given.lines)
        except KernelError:
            return False
        if not torch.equal(found, expected):
            return False
    return True


TURNS_MAX = 40


def sums_are_right(backend: HostBackend) -> bool:
    """Three ranks, whose sums know an order of adding: in any order of theirs, some late, and one that leaves."""

    def work(rank: int, group: DeviceGroup) -> bool:
        return not wrong_sums(group, rank, 3, (torch.float32,), (9, 5003, 3001, *[257] * 25))

    def leave(rank: int, group: DeviceGroup) -> bool:
        if rank == 2:
            return True
        group.all_reduce(torch.ones(5))
        with pytest.raises(RankLost):
            group.require_whole()
        return True

    hasty = msgspec.structs.replace(LIMITS, timeout_ms=400)
    try:
        for orders in ((0, *ORDERS[1:3]), (STRAGGLING, ORDERS[3], 0)):
            if not all(run_threads(backend, orders, work, hasty)):
                return False
        return all(run_threads(backend, (0, 0, 0), leave, hasty))
    except (RankLost, ValueError, KernelError, pytest.fail.Exception):
        return False


def name_of(bug: Bug | None) -> str:
    return bug.name if bug else "as they are"


@pytest.mark.parametrize("backend", [None, *ATTENTION_BUGS], ids=name_of, indirect=True)
def test_attention(backend: HostBackend, request: pytest.FixtureRequest) -> None:
    assert attention_is_right(backend) == (request.node.callspec.params["backend"] is None)


@pytest.mark.parametrize("backend", [None, *GROUP_BUGS], ids=name_of, indirect=True)
def test_groups(backend: HostBackend, request: pytest.FixtureRequest) -> None:
    assert groups_are_right(backend) == (request.node.callspec.params["backend"] is None)


@pytest.mark.parametrize("backend", [None, *CODE_BUGS], ids=name_of, indirect=True)
def test_codes(backend: HostBackend, request: pytest.FixtureRequest) -> None:
    assert codes_are_right(backend) == (request.node.callspec.params["backend"] is None)


@pytest.mark.parametrize("backend", [None, *FP8_BUGS], ids=name_of, indirect=True)
def test_fp8(backend: HostBackend, request: pytest.FixtureRequest) -> None:
    assert fp8_is_right(backend) == (request.node.callspec.params["backend"] is None)


@pytest.mark.parametrize("backend", [None, *ROW_BUGS], ids=name_of, indirect=True)
def test_rows(backend: HostBackend, request: pytest.FixtureRequest) -> None:
    assert rows_are_right(backend) == (request.node.callspec.params["backend"] is None)


@pytest.mark.parametrize("backend", [None, *THIN_BUGS], ids=name_of, indirect=True)
def test_thin_products(backend: HostBackend, request: pytest.FixtureRequest) -> None:
    assert thin_products_are_right(backend) == (request.node.callspec.params["backend"] is None)


def few_bits_are_right(backend: HostBackend) -> bool:
    """Rows and outputs that fill no block, inputs that end within a slab."""
    for form, rows_count in (("lows", 3), ("zero", 1)):
        codes, x = weight(form, 7, 1088, 64), draw(rows_count, 1088, dtype=torch.bfloat16)
        expected = torch.from_numpy(few_bits.sums(x.float().numpy(), few_bits.packed(codes)))
        given = device(codes, torch.bfloat16)
        try:
            for backend.order in ORDERS[:2]:
                if not torch.equal(given.sums(x), expected):
                    return False
        except KernelError:
            return False
    return True


@pytest.mark.parametrize("backend", [None, *FEW_BITS_BUGS], ids=name_of, indirect=True)
def test_products_of_few_bits(backend: HostBackend, request: pytest.FixtureRequest) -> None:
    assert few_bits_are_right(backend) == (request.node.callspec.params["backend"] is None)


@pytest.mark.parametrize("backend", [None, *SAMPLING_BUGS], ids=name_of, indirect=True)
def test_sampling(backend: HostBackend, request: pytest.FixtureRequest) -> None:
    assert tokens_are_right(backend) == (request.node.callspec.params["backend"] is None)


@pytest.mark.parametrize("backend", [None, *EXCHANGE_BUGS], ids=name_of, indirect=True)
def test_sums_over_ranks(backend: HostBackend, request: pytest.FixtureRequest) -> None:
    """A bug of timing shows when threads meet badly, which may take a few turns."""
    if request.node.callspec.params["backend"] is None:
        assert sums_are_right(backend)
    else:
        assert not all(sums_are_right(backend) for _ in range(TURNS_MAX)), "the planted bug is not found"
