"""A program of its own: the kernels under AddressSanitizer, which must be loaded before Python. Its argument is a folder.

Prints "clean" where no kernel touched what is not its own; with "overrun" as the second argument, one does.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import torch
from attention_steps import Options, Range, Shape, attend, check, in_codes, make_sequences
from device_ranks import RankBackend, run_threads, wrong_joins, wrong_sums
from host_shim import ORDERS, HostBackend
from rows_cases import adapters, draw, tiles_of
from sampling_cases import Draws, asked, masked, sampled

from vnext.kernels.calls import RotaryWrite
from vnext.kernels.cuda import backends, rows, sampling, thin

FLAGS = ("-O0", "-g1", "-fsanitize=address")


def attention() -> None:
    """Odd lengths, all kinds of units, fp8, codes, a shared prefix."""
    shape = Shape(4, 2, 16, 16)
    sequences = make_sequences([274, 263], shape, torch.bfloat16, shared=256)
    given = [Range(0, 273, 274), Range(1, 260, 263), Range(0, 260, 274)]
    for found, one in zip(attend(sequences, given, shared=224), given, strict=True):
        check(found, sequences, one)
    attend(sequences, given[:2], shared=256)
    attend(make_sequences([33], shape, torch.bfloat16), [Range(0, 0, 33)], Options(7, 2.0))
    attend(sequences._replace(caches=sequences.caches.to(torch.float8_e4m3fn)), given)
    for shape in (Shape(4, 2, 16, 16), Shape(2, 1, 64, 3)):  # rows of 17 and of 66 bytes, up to the end of a cache
        attend(in_codes(make_sequences([34, 39], shape, torch.bfloat16))[0], [Range(0, 33, 34), Range(1, 30, 39)])


def row_wise() -> None:
    for width in (1, 33, 520):
        x = draw(3, width)
        rows.add_rms_norm(x, x, x[0], 1e-6)
        rows.gate_and_mul(draw(3, 2 * width), "silu")
        rows.embedding_rows(x, torch.tensor([2, 0, 3]), 0)
    caches = torch.zeros(2, 2, 2, 5, 6)
    angles = draw(9, 3)
    rows.rotary_kv_write(draw(9, 10 * 6), RotaryWrite(draw(6), draw(6), 1e-6, angles, angles, *caches, torch.arange(9)))
    caches = torch.zeros(2, 2, 2, 5, 7, dtype=torch.int8)
    rows.rotary_kv_write(draw(9, 10 * 6), RotaryWrite(None, None, 1e-6, angles, angles, *caches, torch.arange(9)))


def sample() -> None:
    draws = Draws(2)
    sampled(draws.logits(6, 77), draws.inputs(6), 64)
    for vocabulary in (77, 4099):
        given = asked(draws, vocabulary, 20)
        allowed = masked(draws, 5, vocabulary)
        sampling.mask_rows(draws.logits(5, vocabulary), allowed.rows, allowed.masks)
        sampling.adjust_rows(draws.logits(5, vocabulary), given.places, given.positions, given.tables)
        given = asked(draws, vocabulary, 20, is_drafted=True)
        sampling.adjust_rows(draws.logits(9, vocabulary), given.places, given.positions, given.tables, given.drafts)


def thin_products() -> None:
    """Odd sizes, one segment and two; the last region ends with its matrices."""
    for inputs, widths, ranks in ((7, (5,), [[1]]), (530, (33, 17), [[3, 0], [17, 20]])):
        for dtype in (torch.float32, torch.bfloat16):
            given, tiles = adapters(inputs, widths, ranks, dtype), tiles_of([(len(ranks) - 1, range(10)), (0, [10])], unused=1)
            thin.add_tiled(draw(11, given.columns, dtype=dtype), draw(11, inputs, dtype=dtype), given.memory, *tiles, given.lines)


def exchange(backend: RankBackend) -> None:
    """Sums and joins of two ranks, slots exactly as large as they must be."""
    reported = run_threads(
        backend, ORDERS[1:3], lambda rank, group: wrong_sums(group, rank, 2, (torch.float32,)) + wrong_joins(group, rank, 2)
    )
    assert reported == [[], []], reported


def overrun(backend: HostBackend) -> None:
    """One element more than there is."""
    x = torch.zeros(1, 256)
    kernel = backend.kernel("rows.cu", "gather_rows", rows.macros(x))
    kernel((1,), (256,), (x, x, torch.zeros(1, dtype=torch.int64), np.int64(0), np.int64(1), np.int32(257), np.int32(4)))


def main(folder: str, *wish: str) -> None:
    backend = RankBackend(Path(folder), FLAGS)
    backends.use("cpu", lambda: backend)
    if wish:
        overrun(backend)
    for backend.order in ORDERS[2:3]:
        attention()
        row_wise()
        sample()
        thin_products()
    exchange(backend)
    print("clean")


if __name__ == "__main__":
    main(*sys.argv[1:])
