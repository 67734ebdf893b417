"""Faults to plant into the sources: each a text and what stands in its place."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import NamedTuple

from vnext.kernels.cuda.interface import sources


class Bug(NamedTuple):
    """One change of one file of `cuda/`."""

    name: str
    file: str
    right: str
    wrong: str


ATTENTION, KEYS = "paged_attention.cu", "attention_keys.cuh"
ATTENTION_BUGS = [
    Bug(
        "no barrier before the keys are read",
        ATTENTION,
        "copy_async_wait<1>();\n        __syncthreads();",
        "copy_async_wait<1>();",
    ),
    Bug(
        "no barrier before a stage is filled again",
        ATTENTION,
        "if (!IS_NARROW) __syncthreads();",
        "",
    ),
    Bug("no wait for the keys", ATTENTION, "copy_async_wait<1>();", ""),
    Bug("one group too few waited for", ATTENTION, "copy_async_wait<1>();", "copy_async_wait<2>();"),
    Bug(
        "the next page",
        KEYS,
        "table_stride + position / heads.block_size",
        "table_stride + (position + 1) / heads.block_size",
    ),
    Bug("the page of another head", KEYS, "heads.kv_heads + int(blockIdx.y))", "heads.kv_heads + int(blockIdx.y / 2))"),
    Bug(
        "splits added without their peaks",
        ATTENTION,
        "value = joined(value, coming_value, by);",
        "value += coming_value;",
    ),
    Bug("the last split left out", ATTENTION, "at < merge[2]; ++at", "at + 1 < merge[2]; ++at"),
    Bug(
        "a split that starts with the sums of the last one",
        ATTENTION,
        "step_at * KEYS / GROUP, is_last);\n            clear(sums);",
        "step_at * KEYS / GROUP, is_last);",
    ),
    Bug("a query that does not see itself", ATTENTION, "position > limit ||", "position >= limit ||"),
    Bug("a window one key too wide", ATTENTION, "position <= limit - window", "position < limit - window"),
    Bug("lanes that keep their share of a total", ATTENTION, "sums.totals[1] = row_sum(sums.totals[1]);", ""),
    Bug("sums that a new peak leaves as they were", ATTENTION, "kept[0] != 1.0f || kept[1] != 1.0f", "kept[0] != 1.0f"),
    Bug(
        "a step taken for one that all rows see",
        ATTENTION,
        "last <= min(limits[0], limits[1])",
        "last <= max(limits[0], limits[1])",
    ),
    Bug("a row's peak of two lanes", ATTENTION, "    x = fmaxf(x, __shfl_xor_sync(ALL_LANES, x, 1));\n", ""),
    Bug("keys behind the end not hidden by zeros", KEYS, "value_cache + source, valid);", "value_cache + source, 16);"),
    Bug(
        "tiles of values swapped",
        "attention_tiles.cuh",
        "mma_m16n8k16<T>(sums[n], a, {b[0], b[1]});",
        "mma_m16n8k16<T>(sums[n], a, {b[2], b[3]});",
    ),
]
GROUP_BUGS = [
    Bug("groups joined split by split", ATTENTION, "if (--left == 0) {", "if (false) {"),
    Bug("a group that goes on to the end", ATTENTION, "(step_at + 1) * KEYS % GROUP == 0", "false"),
    Bug("groups of half the splits", ATTENTION, "(step_at + 1) * KEYS % GROUP == 0", "(step_at + 1) * KEYS % (GROUP / 2) == 0"),
    Bug("a group that starts with the sums of the last one", ATTENTION, "leaves_sums ? group : 0);\n    clear_private(own);", "leaves_sums ? group : 0);"),
    Bug("the last group alone", ATTENTION, "if (!leaves_sums && group > unit.key_first / GROUP) join", "if (false) join"),
    Bug("waiting sums without the higher peak", ATTENTION, "        kept[0] = before.x;\n", ""),
    Bug("one slot for all groups", ATTENTION, "leaves_sums ? group : 0);", "0);"),
    Bug("marks read when they are written", ATTENTION, "    __syncwarp();  // four lanes", "    // four lanes"),
    Bug("half of the totals", ATTENTION, "kept[32] = joined(before.y, kept[32], by);", ""),
]
CODES = "codes.cuh"
CODE_BUGS = [
    Bug("the largest of half a block", CODES, "for (int bits = 16; bits > 0", "for (int bits = 8; bits > 0"),
    Bug("codes cut and not rounded", CODES, "Code(rintf(scaled))", "Code(scaled)"),
    Bug("numbers out of range", CODES, "fminf(fmaxf(x * exact_power(CODE_BITS - exponent), -127.0f), 127.0f)", "x * exact_power(CODE_BITS - exponent)"),
    Bug("a copy that begins with its row", KEYS, "return IS_CODED ? unsigned(row) * ROW_WIDTH % 16 : 0;", "return 0;"),
    Bug("a row copied without its end", KEYS, "max(ROW_WIDTH + offset - place, 0)", "max(ROW_WIDTH - place, 0)"),
    Bug("codes of one word alone", KEYS, "__funnelshift_r(words[0], words[1], shift)", "words[0] >> shift"),
    Bug("codes of the second word alone", KEYS, "__funnelshift_r(words[1], words[2], shift)", "words[1] >> shift"),
    Bug("the first exponent for all blocks", KEYS, "[offset + HEAD_DIM + place / CODES_A_SCALE]", "[offset + HEAD_DIM]"),
    Bug("the first row's place for all", KEYS, "*offset_at(stage, key) : 0", "*offset_at(stage, 0) : 0"),
    Bug("codes without their sign", KEYS, "taken.numbers.words[i / 4] ^ SIGNS", "taken.numbers.words[i / 4]"),
    Bug("helpers that widen what others do", KEYS, "int first = threadIdx.x / 32 * KEYS_A_WARP + lane", "int first = lane"),
    Bug("keys of one turn alone", KEYS, "const int key = first + i * stride;", "const int key = first + i * 2 * stride;"),
    Bug("no barrier before widened keys are read", ATTENTION, "widen(wide, stage);\n            __syncthreads();", "widen(wide, stage);"),
    Bug("no barrier before keys are widened again", ATTENTION, "__syncthreads();\n        if (IS_NARROW) {", "if (IS_NARROW) {"),
]
FP8_BUGS = [
    Bug("a pair in the place of another", KEYS, ">> i % 4 * 8);", ">> (2 - i % 4) * 8);"),
    Bug("both numbers of a pair the same", KEYS, "numbers[i + 1] = both.y;", "numbers[i + 1] = both.x;"),
    Bug("the first eight of a row for all", KEYS, "<const Narrow *>(row + place)", "<const Narrow *>(row)"),
]
ROW_BUGS = [
    Bug("no barrier in the sum of a block", "platform.cuh", "x;\n    __syncthreads();", "x;"),
    Bug(
        "no barrier between a head and its turn",
        "rows.cu",
        "    __syncwarp();\n    const int kv_head",
        "    const int kv_head",
    ),
    Bug(
        "neighbours, not halves, form a pair",
        "rows.cu",
        "const bool is_first = i < half;",
        "const bool is_first = i % 2 == 0;",
    ),
    Bug(
        "rounding left out between norm and weight",
        "rows.cu",
        "rounded<SCALAR>(rounded<W>(normed) * to_float(weight))",
        "rounded<SCALAR>(normed * to_float(weight))",
    ),
]
SEARCH, ROWS_READ = "sampling_search.cuh", "sampling_rows.cuh"
SAMPLING_BUGS = [
    Bug(
        "no barrier before a digit is looked for",
        SEARCH,
        "% BINS), mass);\n        });\n        __syncthreads();",
        "% BINS), mass);\n        });",
    ),
    Bug("the token after the one drawn", SEARCH, "return last - int(", "return last + 1 - int("),
    Bug("a need that the higher digits do not lessen", SEARCH, "    search->need = need - above;\n", ""),
    Bug("what is no number passes for one", "sampling.cu", "spoilt[at] = logit != logit;", "spoilt[at] = false;"),
    Bug("the first token's number for the row's", "sampling.cu", "row.logits[token];  // the first NaN", "row.logits[0];  // the first NaN"),
    Bug("the higher id among equals", ROWS_READ, "a.token < b.token", "a.token > b.token"),
    Bug("few tokens for all that a mass needs", "sampling.cu", "if (wanted <= found.mass) {", "if (true) {"),
    Bug(
        "no barrier before the few are counted",
        "sampling.cu",
        "*space.count = 0;\n    __syncthreads();",
        "*space.count = 0;",
    ),
    Bug(
        "no barrier between bias and penalties",
        "sampling.cu",
        "bias_room + entry]);\n        }\n        __syncthreads();",
        "bias_room + entry]);\n        }",
    ),
    Bug("bits from the top of a mask's words", "sampling.cu", ">> token % 32 & 1", ">> (31 - token % 32) & 1"),
    Bug("the prompt's mark counted", "sampling.cu", "count = entry & (IN_PROMPT - 1)", "count = entry"),
    Bug("the last token counted as a draft", "sampling.cu", "draft = at - depth + 1", "draft = at - depth"),
    Bug("a draft that does not count", "sampling.cu", "draft <= at; ++draft", "draft < at; ++draft"),
]

THIN = "thin.cu"
FEW_BITS = "few_bits.cu"
FEW_BITS_BUGS = [
    Bug("codes in falling order", FEW_BITS, "word >> 4 * i & 15", "word >> 4 * (7 - i) & 15"),
    Bug("a code one too large", FEW_BITS, "& 15) - zero)", "& 15) - zero + 1)"),
    Bug("the scale of the group behind", FEW_BITS, "min(input, inputs - 1) >> group_log", "min(input + CODES, inputs - 1) >> group_log"),
    Bug("a low that rounds with its product", FEW_BITS, "__fsub_rn(part, __fmul_rn(summed[r], low))", "fmaf(-summed[r], low, part)"),
    Bug("a scale that rounds with its sum", FEW_BITS, "__fadd_rn(totals[o][r], part)", "fmaf(sums[r], scale, totals[o][r])"),
    Bug("numbers behind the end of a row", FEW_BITS, "left, whole && left >= CODES);", "CODES, false);"),
    Bug("the first output for all of a warp", FEW_BITS, "min(first + o, outputs - 1) * slabs", "first * slabs"),
]
THIN_BUGS = [
    Bug("no barrier before chains are added", THIN, "    __syncthreads();\n    for (int at", "    for (int at"),
    Bug("no barrier before the ranks are read", THIN, "    __syncthreads();\n    if (column", "    if (column"),
    Bug("products that do not round by themselves", THIN, "__fadd_rn(sum, __fmul_rn(a, b))", "fmaf(a, b, sum)"),
    Bug("a segment that goes on to the end", THIN, "end = min(begin + SEGMENT, inputs)", "end = inputs"),
    Bug("the last chain left out", THIN, "chain < CHAINS; ++chain", "chain + 1 < CHAINS; ++chain"),
    Bug("the last segment left out", THIN, "segment < segments; ++segment", "segment + 1 < segments; ++segment"),
    Bug("two tokens taken for one", THIN, "tile.count == 1)\n        down_rows<1>", "tile.count <= 2)\n        down_rows<1>"),
    Bug("the first token's row for all", THIN, "(t < tile.count ? t : 0)", "0"),
    Bug("the first line for all", THIN, "[first_line + blockIdx.z]", "[first_line]"),
]

EXCHANGE = "all_reduce.cu"
EXCHANGE_BUGS = [
    Bug(
        "a flag that releases nothing",
        EXCHANGE,
        "store_release_system(&theirs->reported[phase][turn->turn][group.rank], operation);",
        "*const_cast<volatile unsigned *>(&theirs->reported[phase][turn->turn][group.rank]) = operation;",
    ),
    Bug(
        "a look that acquires nothing",
        EXCHANGE,
        "is_before(load_acquire_system(reported), operation); ++looks",
        "is_before(*const_cast<const volatile unsigned *>(reported), operation); ++looks",
    ),
    Bug(
        "reported before the whole block has published",
        EXCHANGE,
        "    __syncthreads();\n    const int other",
        "    const int other",
    ),
    Bug(
        "no barrier behind the wait",
        EXCHANGE,
        "    __syncthreads();\n    return turn->is_whole;",
        "    return turn->is_whole;",
    ),
    Bug("the flag of the operation before", EXCHANGE, "reported - operation > 1u", "reported + 1u - operation > 2u"),
    Bug(
        "one set of slots, written while others read",
        EXCHANGE,
        "operation % SETS * capacity_bytes",
        "0 * capacity_bytes",
    ),
    Bug("the second meeting waits for the first", EXCHANGE, "&own->reported[phase]", "&own->reported[ENTERED]"),
    Bug(
        "the own part first",
        EXCHANGE,
        "(group.slot<Chunk<SCALAR>>(rank, operation) + at)",
        "(group.slot<Chunk<SCALAR>>((group.rank + rank) % WORLD, operation) + at)",
    ),
    Bug("blocks by their index, not by their start", EXCHANGE, "*turn = {unsigned(before),", "*turn = {blockIdx.x,"),
    Bug("a missing rank that nobody hears of", EXCHANGE, "if (coming == MISSING) ", "if (false) "),
]


def plant(bug: Bug, folder: Path) -> Path:
    """A copy of the sources with the bug, in a new folder."""
    copied = Path(shutil.copytree(sources(), folder / bug.name.replace(" ", "_").replace(",", "")))
    path = copied / bug.file
    text = path.read_text()
    assert text.count(bug.right) == 1, f"{bug.file} no longer has {bug.right!r} exactly once"
    path.write_text(text.replace(bug.right, bug.wrong))
    return copied
