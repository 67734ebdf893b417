"""Calls of the compiled kernels with plain arrays: one program for any processor, which needs no torch.

    python kernel_calls.py FILE.npz [LEVEL ...]

At these levels, or at every one of the machine, it computes each operation, and checks what must hold within the level: a row is that row among
others, two threads are one, a decode is the last token of its prompt. The file then holds the results as LEVEL/operation, numbers
of bfloat16 as uint16. test_arm.py compares the files of two processors. Inputs are drawn as integers, which no processor rounds.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import numpy as np

from vnext.base.compiled import load

native = load("vnext.kernels.cpu._native")
CONSTANTS = SimpleNamespace(**{name: value for name, value in native.CONSTANTS.items() if name.isupper()})
LEVELS = ("PORTABLE", "AVX2", "AVX512", "AVX512_BF16", "AMX", "NEON", "NEON_BF16")
KINDS = {"float32": CONSTANTS.FLOAT32, "bfloat16": CONSTANTS.BFLOAT16}
GATES = {"plain": CONSTANTS.NO_GATE, "silu": CONSTANTS.SILU, "gelu": CONSTANTS.GELU_TANH}
ROWS = 23
PRODUCTS = [(96, 160, 1), (70, 100, 1), (33, 31, 1), (96, 256, 4), (33, 99, 3), (40, 104, 8)]
"""Outputs, inputs and shards of them."""
ATTENTIONS = {(8, 4, 8, 16): (300, 77, 17), (3, 1, 64, 16): (262, 21), (4, 4, 80, 3): (70, 5, 33), (7, 1, 32, 1): (90, 64)}
"""Heads, heads of keys, numbers of a head and tokens of a block, with the lengths of sequences."""
TOKENS = 9
Named = Iterator[tuple[str, np.ndarray]]


def numbers(*shape: int, seed: int = 0) -> np.ndarray:
    """float32 in [-4, 4) of 16 bits each."""
    return np.random.default_rng(seed + sum(shape)).integers(-(2**15), 2**15, shape).astype(np.float32) / 2**13


def bf16(x: np.ndarray) -> np.ndarray:
    """float32 rounded to the upper halves of its words, uint16; a NaN stays one."""
    bits = np.ascontiguousarray(x).view(np.uint32)
    rounded = (bits + (0x7FFF + (bits >> 16 & 1)).astype(np.uint32)) >> 16
    return np.where(np.isnan(x), 0x7FC0, rounded).astype(np.uint16)


def typed(x: np.ndarray, dtype: str) -> np.ndarray:
    return x if dtype == "float32" else bf16(x)


def at(array: np.ndarray | None) -> int | None:
    return None if array is None else array.ctypes.data


def stride(array: np.ndarray) -> int:
    """Elements from row to row."""
    return array.strides[0] // array.itemsize


def require_same(found: np.ndarray, expected: np.ndarray, what: str) -> None:
    if found.tobytes() != np.ascontiguousarray(expected).tobytes():
        raise AssertionError(f"level {native.level()}: {what} changed bits")


# ---- products ----------------------------------------------------------------------------------------------------


def pack(weight: np.ndarray, kind: int, gate: int, bias: np.ndarray, shards: int) -> np.ndarray:
    outputs, inputs = weight.shape
    buffer = np.zeros(native.packed_bytes(outputs, inputs, kind, gate, shards) + 64, np.uint8)
    buffer = buffer[-buffer.ctypes.data % 64 :]
    parts = np.array([[at(weight), outputs, inputs]], np.int64)
    native.pack_linear(at(parts), kind, at(bias), outputs, inputs, gate, shards, at(buffer))
    return buffer


def multiplied(x: np.ndarray, packed: np.ndarray, width: int, dtype: str) -> np.ndarray:
    result = np.empty((len(x), width), np.float32 if dtype == "float32" else np.uint16)
    native.linear(at(x), stride(x), len(x), at(packed), None, at(result), width, KINDS[dtype], 0)
    return result


def product_inputs(outputs: int, inputs: int, dtype: str) -> tuple[np.ndarray, np.ndarray]:
    """x [ROWS, inputs] and weight [outputs, inputs] as float32, each exact in the dtype."""
    both = numbers(ROWS, inputs), numbers(outputs, inputs, seed=1)
    if dtype == "float32":
        return both
    return tuple((bf16(each).astype(np.uint32) << 16).view(np.float32) for each in both)


def products() -> Named:
    for (outputs, inputs, shards), dtype, gate in itertools.product(PRODUCTS, KINDS, GATES):
        if gate != "plain" and outputs % 2:
            continue
        x, weight = product_inputs(outputs, inputs, dtype)
        x, weight, bias = typed(x, dtype), typed(weight, dtype), typed(np.zeros(outputs, np.float32), dtype)
        packed = pack(weight, KINDS[dtype], GATES[gate], bias, shards)
        width = outputs if gate == "plain" else outputs // 2
        for result in ("float32", "bfloat16") if dtype == "bfloat16" else ("float32",):
            whole = multiplied(x, packed, width, result)
            for first, last in ((0, 1), (3, 5), (1, 4), (2, 6), (4, 9), (5, 11), (3, 10), (22, 23)):
                require_same(multiplied(x[first:last], packed, width, result), whole[first:last], f"{last - first} rows of {dtype}")
            yield f"product {dtype} {outputs}x{inputs} {gate} {result}", whole


def coded(bits: int, group: int, outputs: int, inputs: int, has_lows: bool, multiplied: int) -> np.ndarray:
    """A packed weight of few bits for float32: scales of float16 alone, or uint8 times float32 with lows."""
    random, count = np.random.default_rng(bits + group), inputs // group
    codes = random.integers(0, 2**bits, (outputs, inputs), np.uint8)
    spans, parts = numbers(outputs), random.integers(0, 256, (2, outputs, count), np.uint8)
    alone = (parts[0] / np.float32(64)).astype(np.float16)
    form = [at(parts[0]), CONSTANTS.UINT8, at(spans), CONSTANTS.FLOAT32, inputs] if has_lows else [at(alone), CONSTANTS.FLOAT16, 0, 0, 0]
    lows = [at(parts[1]), *form[1:]] if has_lows else [0, -1, 0, 0, 0]
    fields = np.array([[at(codes), outputs, inputs, bits, 0 if has_lows else 2 ** (bits - 1), group, *form, *lows]], np.int64)
    size = native.codes_bytes(at(fields), 1, inputs, CONSTANTS.NO_GATE, 1)
    buffer = np.zeros(size + 64, np.uint8)
    buffer = buffer[-buffer.ctypes.data % 64 :]
    native.pack_codes(at(fields), None, 1, None, CONSTANTS.FLOAT32, inputs, CONSTANTS.FLOAT32, multiplied, CONSTANTS.NO_GATE, 1, 0, -(-outputs // 32),
                      at(buffer))
    return buffer


def coded_products() -> Named:
    for bits, group, has_lows, activations in itertools.product((8, 6, 5, 4, 3, 2), (16, 32, 128), (False, True), ("INT8", "BFLOAT16")):
        packed, x = coded(bits, group, 50, 256, has_lows, getattr(CONSTANTS, activations)), numbers(ROWS, 256)
        whole = multiplied(x, packed, 50, "float32")
        for first, last in ((0, 1), (3, 5), (5, 11)):
            require_same(multiplied(x[first:last], packed, 50, "float32"), whole[first:last], f"{last - first} rows of {bits} bits")
        yield f"product of codes {bits} {group} {has_lows} {activations}", whole


# ---- rows --------------------------------------------------------------------------------------------------------


def norms() -> Named:
    for dtype, wide, width in itertools.product(KINDS, (False, True), (64, 70)):
        x, residual = typed(numbers(ROWS, width), dtype), typed(numbers(ROWS, width, seed=1), dtype)
        weight = numbers(width) if wide else typed(numbers(width), dtype)
        kind = CONSTANTS.BFLOAT16_WIDE_NORM if wide and dtype == "bfloat16" else KINDS[dtype]
        normed, total = np.empty_like(x), np.empty_like(x)
        native.rms_norm(
            kind, at(x), width, at(residual), width, at(weight), 1.0 if wide else 0.0, 1e-6, ROWS, width, at(normed), at(total)
        )
        yield f"norm {dtype} {wide} {width}", np.concatenate((normed, total))


def gates() -> Named:
    for dtype, gate, width in itertools.product(KINDS, ("silu", "gelu"), (64, 35)):
        x, result = typed(8 * numbers(ROWS, 2 * width), dtype), np.empty((ROWS, width), typed(np.zeros(1, np.float32), dtype).dtype)
        native.gate_and_mul(KINDS[dtype], at(x), 2 * width, ROWS, width, GATES[gate], at(result))
        yield f"gate {dtype} {gate} {width}", result
    slopes = np.array([0.8, 0.9], np.float32)
    for dtype, width, alone in itertools.product(KINDS, (64, 35), ("GELU_TANH", "GELU", "RELU2", "XIELU")):
        x = typed(2 * numbers(ROWS, width), dtype)
        result, number = np.empty_like(x), getattr(CONSTANTS, alone)
        native.activate(KINDS[dtype], at(x), width, ROWS, width, number, at(slopes[:1]), at(slopes[1:]), at(result))
        yield f"{alone} {dtype} {width}", result


def layer_norms() -> Named:
    for dtype, width in itertools.product(KINDS, (64, 70)):
        x = typed(numbers(ROWS, width), dtype)
        weight, bias, normed = numbers(width, seed=1), numbers(width, seed=2), np.empty_like(x)
        native.layer_norm(KINDS[dtype], at(x), width, at(weight), at(bias), 1e-6, ROWS, width, at(normed))
        yield f"layer norm {dtype} {width}", normed


def thin() -> Named:
    tokens, inputs, rank, width = np.array([1, 4, 5, 6, 9, 20], np.int64), 70, 5, 40
    for dtype in KINDS:
        x, product = typed(numbers(ROWS, inputs), dtype), typed(numbers(ROWS, 64), dtype)
        down, up = np.zeros((inputs, 16), np.float32), np.zeros((3, rank, 16), np.float32)
        down[:, :rank], up[:] = numbers(inputs, rank), numbers(3, rank, 16)
        down, up = typed(down, dtype), typed(up, dtype)
        parts = np.array([[at(down), at(up), at(tokens), len(tokens), rank, 16, 16, width]], np.int64)
        native.add_thin(KINDS[dtype], at(x), inputs, inputs, 1, at(product), 64, at(parts), 1, None, 1)
        yield f"thin {dtype}", product


def wild(tokens: int, width: int) -> np.ndarray:
    """Numbers of many sizes, among them zeros, numbers far too small, infinities and NaN."""
    found = numbers(tokens, width) * np.exp2(np.random.default_rng(width).integers(-30, 30, (tokens, 1))).astype(np.float32)
    found[0], found[1] = 0, found[1] * np.float32(2.0**-110)
    found[2, ::7], found[3, ::5], found[4, ::3] = np.inf, -np.inf, np.nan
    return found


def rotations() -> Named:
    heads, kv_heads, block_size = 4, 2, 5
    for dtype, head_dim, is_coded in itertools.product(KINDS, (8, 64, 80), (False, True)):
        given = wild(TOKENS, (heads + 2 * kv_heads) * head_dim) if is_coded else numbers(TOKENS, (heads + 2 * kv_heads) * head_dim)
        joined, turns = typed(given, dtype), numbers(2, TOKENS, head_dim // 2) / 4
        norm = None if is_coded else typed(numbers(head_dim), dtype)
        caches = cache_of(joined.dtype, 4, kv_heads, block_size, head_dim, is_coded)
        query, slots = np.empty((TOKENS, heads, head_dim), joined.dtype), np.arange(TOKENS, dtype=np.int64)[::-1] * 2
        native.rotary_kv_write(
            KINDS[dtype], at(joined), stride(joined), TOKENS, at(norm), at(norm), 0.0, 1e-6, at(turns[0]), at(turns[1]),
            head_dim if not is_coded else 0, at(caches[0]), at(caches[1]), at(np.ascontiguousarray(slots)), heads, kv_heads, head_dim,
            block_size, stride(caches[0]), CONSTANTS.INT8 if is_coded else KINDS[dtype], at(query),
        )  # fmt: skip
        yield f"rotary {dtype} {head_dim} {'codes' if is_coded else 'plain'}", caches
        if not is_coded:
            yield f"rotary {dtype} {head_dim} query", query


def cache_of(dtype: np.dtype, pages: int, kv_heads: int, block_size: int, head_dim: int, is_coded: bool) -> np.ndarray:
    """Keys and values [2, pages, kv_heads, block_size, head_dim], or codes and exponents in place of a head's numbers."""
    width = head_dim + -(-head_dim // 32) if is_coded else head_dim
    return np.zeros((2, pages, kv_heads, block_size, width), np.int8 if is_coded else dtype)


# ---- attention ---------------------------------------------------------------------------------------------------


class Sequences:
    """Random sequences whose keys and values lie in scattered blocks, written there by the kernels themselves."""

    def __init__(self, shape: tuple[int, int, int, int], dtype: str, is_coded: bool) -> None:
        self.lengths = ATTENTIONS[shape]
        self.heads, self.kv_heads, self.head_dim, self.block_size = shape
        self.kind = KINDS[dtype]
        self.cache_kind = CONSTANTS.INT8 if is_coded else self.kind
        counts = [-(-length // self.block_size) for length in self.lengths]
        order = np.random.default_rng(1).permutation(sum(counts)).astype(np.int32)
        ends = np.cumsum(counts)
        self.table = np.full((len(self.lengths), max(counts)), -1, np.int32)
        for row, (end, count) in enumerate(zip(ends, counts)):
            self.table[row, :count] = order[end - count : end]
        self.query = [self.written(row, typed(numbers(length, self.joined_width, seed=row), dtype), is_coded)
                      for row, length in enumerate(self.lengths)]  # fmt: skip

    @property
    def joined_width(self) -> int:
        return (self.heads + 2 * self.kv_heads) * self.head_dim

    def written(self, row: int, joined: np.ndarray, is_coded: bool) -> np.ndarray:
        if row == 0:
            self.caches = cache_of(joined.dtype, int(self.table.max()) + 1, self.kv_heads, self.block_size, self.head_dim, is_coded)
        place = np.arange(len(joined))
        slots = self.table[row][place // self.block_size].astype(np.int64) * self.block_size + place % self.block_size
        query = np.empty((len(joined), self.heads, self.head_dim), joined.dtype)
        native.rotary_kv_write(
            self.kind, at(joined), stride(joined), len(joined), None, None, 0.0, 1e-6, None, None, 0, at(self.caches[0]),
            at(self.caches[1]), at(slots), self.heads, self.kv_heads, self.head_dim, self.block_size, stride(self.caches[0]),
            self.cache_kind, at(query),
        )  # fmt: skip
        return query

    def attend(self, ranges: list[tuple[int, int, int]], window: int, cap: float) -> list[np.ndarray]:
        """One step: for each (row, start, stop) the result of its queries [start, stop) after stop tokens."""
        sizes = [stop - start for _, start, stop in ranges]
        starts, lengths = np.cumsum([0, *sizes]).astype(np.int64), np.array([stop for _, _, stop in ranges], np.int64)
        table = np.ascontiguousarray(self.table[[row for row, _, _ in ranges]])
        query = np.concatenate([self.query[row][start:stop] for row, start, stop in ranges])
        plan = native.plan_attention(
            at(starts), at(lengths), at(table), stride(table), len(ranges), self.heads, self.kv_heads, self.block_size
        )
        result, sinks = np.empty_like(query), numbers(self.heads)
        native.attention(
            self.kind, plan, at(query), at(self.caches[0]), at(self.caches[1]), at(result), self.head_dim, stride(self.caches[0]),
            self.cache_kind, self.head_dim**-0.5, window, cap, at(sinks if cap else None),
        )  # fmt: skip
        return np.split(result, starts[1:-1])


def attentions() -> Named:
    for shape, dtype, is_coded in itertools.product(ATTENTIONS, KINDS, (False, True)):
        sequences = Sequences(shape, dtype, is_coded)
        ends = list(enumerate(sequences.lengths))
        for window, cap in ((0, 0.0), (40, 2.0)) if shape[2] == 8 else ((0, 0.0),):
            whole = sequences.attend([(row, 0, end) for row, end in ends], window, cap)
            last = sequences.attend([(row, end - 1, end) for row, end in ends], window, cap)
            chunk = sequences.attend([(1, 2, 5), (0, 29, 64)], window, cap)[1]
            require_same(np.concatenate(last), np.concatenate([each[-1:] for each in whole]), "a decode")
            require_same(chunk, whole[0][29:64], "a chunk")
            yield f"attention {dtype} {shape} {'codes' if is_coded else 'plain'} {window}", np.concatenate(whole)


# ---- sampling ----------------------------------------------------------------------------------------------------


def sampled() -> Named:
    rows, vocabulary = 12, 1037
    logits = 2 * numbers(rows, vocabulary)
    logits[3, 5] = np.nan
    given = {
        "temperature": [0, 1, 0.7, 1] * 3, "top_k": [0, 0, 20, 50] * 3, "top_p": [1, 0.9, 1, 0.8] * 3, "min_p": [0, 0, 0.05, 0] * 3,
        "top_n_sigma": [0, 0, 0, 1] * 3, "seed": range(rows), "position": range(7, 7 + rows),
    }  # fmt: skip
    columns = [column.split(" ") for column in native.SAMPLE_COLUMNS.split(",")]
    arrays = [np.array(list(given[name]), np.float32 if kind == "float" else np.int64) for kind, name in columns]
    places, tokens = np.array([at(array) for array in arrays], np.int64), np.empty(rows, np.int64)
    native.sample_rows(at(logits), vocabulary, rows, vocabulary, at(places), at(tokens))
    yield "sampled tokens", tokens
    yield from reported(logits, tokens)
    words = np.random.default_rng(3).integers(0, 2**32, (rows, -(-vocabulary // 32)), np.uint32)
    masks = np.array([at(row) if index % 3 else 0 for index, row in enumerate(words)], np.int64)
    native.mask_rows(at(logits), vocabulary, rows, vocabulary, at(masks))
    yield "masked logits", logits


def reported(logits: np.ndarray, tokens: np.ndarray) -> Named:
    """Log-probabilities with five alternatives, and logits after penalties."""
    (rows, vocabulary), count = logits.shape, 5
    logprobs, top_logprobs = np.empty(rows, np.float32), np.empty((rows, count), np.float32)
    ranks, top_tokens = np.empty(rows, np.int64), np.empty((rows, count), np.int64)
    outputs = (at(each) for each in (logprobs, ranks, top_tokens, top_logprobs))
    native.report_rows(at(logits), vocabulary, rows, vocabulary, at(tokens), count, *outputs)
    for name, found in (("logprobs", logprobs), ("ranks", ranks), ("top tokens", top_tokens), ("top logprobs", top_logprobs)):
        yield f"reported {name}", found
    rng, penalised, places = np.random.default_rng(8), logits.copy(), np.arange(0, rows, 2)
    prompts, counts = rng.random((len(places), vocabulary)) < 0.1, rng.poisson(0.1, (len(places), vocabulary)).astype(np.int32)
    rates = [rng.uniform(low, 2, len(places)).astype(np.float32) for low in (0.5, -2, -2)]
    addresses = [np.array([at(row) for row in table], np.int64) for table in (prompts, counts)]
    given = at(places), *map(at, addresses), *map(at, rates)
    native.penalise_rows(at(penalised), vocabulary, vocabulary, len(places), *given)
    yield "penalised logits", penalised


OPERATIONS: tuple[Callable[[], Named], ...] = (
    products, coded_products, norms, layer_norms, gates, thin, rotations, attentions, sampled,
)  # fmt: skip


def results_of_level(level: str) -> dict[str, np.ndarray]:
    """Everything at one level, with one thread and with two."""
    native.set_level(native.CONSTANTS[level])
    found: dict[str, np.ndarray] = {}
    for threads in (1, 2):
        native.configure_team(threads, 20)
        for name, array in itertools.chain.from_iterable(operation() for operation in OPERATIONS):
            require_same(array, found.setdefault(name, array), f"{name}: a second thread")
    native.configure_team(1, 0)
    return found


def main(path: str, *wanted: str) -> None:
    there = [level for level in LEVELS if native.has_level(native.CONSTANTS[level])]
    print(LEVELS[native.level()], *there)  # the one that is chosen unasked, then all
    np.savez(path, **{f"{level}/{name}": array for level in wanted or there for name, array in results_of_level(level).items()})


if __name__ == "__main__":
    main(*sys.argv[1:])
