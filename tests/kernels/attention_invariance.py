"""A program: under MKL_CBWR each query's result is bitwise the same alone, in a batch, chunked or decoded."""

from __future__ import annotations

import torch
from attention_cases import attend, make_sequences

from vnext.kernels.table import choose

LENGTHS = [300, 1, 77, 128, 129, 260, 17, 5]
SHAPES = [(4, 4, 4, 16), (4, 4, 8, 16), (8, 4, 8, 16), (6, 2, 64, 3), (4, 1, 128, 16), (7, 1, 80, 1), (2, 2, 64, 200)]


def check_attention(heads: int, kv_heads: int, head_dim: int, block_size: int) -> None:
    """Whole prompts in one step against alone, chunked, and decoded beside a prefill."""
    sequences = make_sequences(LENGTHS, heads, kv_heads, head_dim, block_size)
    together = attend(sequences, [(index, 0, length) for index, length in enumerate(LENGTHS)])
    for index, length in enumerate(LENGTHS):
        assert torch.equal(attend(sequences, [(index, 0, length)])[0], together[index]), "alone"
    for size in (1, 7, 16, 50):
        for start in range(0, LENGTHS[0], size):
            stop = min(start + size, LENGTHS[0])
            found = attend(sequences, [(2, 0, 30), (0, start, stop), (3, 127, 128)])
            assert torch.equal(found[1], together[0][start:stop]), f"chunk of {size} at {start}"
            assert torch.equal(found[2], together[3][127:]), "decode"
    last = attend(sequences, [(index, length - 1, length) for index, length in enumerate(LENGTHS)])
    for index, length in enumerate(LENGTHS):
        assert torch.equal(last[index], together[index][-1:]), "a step of decodes"


def check_rows(width: int) -> None:
    """Each row of the row-wise operations against that row alone."""
    x = torch.randn(67, width, generator=torch.Generator().manual_seed(1)) * 3
    weight = torch.linspace(0.5, 1.5, width)
    norm, gate = choose("rms_norm", "cpu"), choose("silu_and_mul", "cpu")
    whole_norm, whole_gate = norm(x, weight, 1e-5), gate(x)
    for start, stop in ((0, 1), (3, 4), (66, 67), (10, 12), (1, 34)):
        part = x[start:stop].clone()
        assert torch.equal(norm(part, weight, 1e-5), whole_norm[start:stop]), f"rms_norm {width}"
        assert torch.equal(gate(part), whole_gate[start:stop]), f"silu_and_mul {width}"


if __name__ == "__main__":
    for shape in SHAPES:
        check_attention(*shape)
    for width in (64, 100, 172, 344, 2048, 8190):
        check_rows(width)
    print("invariant")
