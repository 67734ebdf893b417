"""Inputs as tokens: what they spell is read again, and the name of a block tells all inputs of which it holds a part."""

from __future__ import annotations

import numpy as np
import pytest

from vnext.state.block_hash import block_hashes, leading_hashes, root_hash
from vnext.state.store import columns_numpy
from vnext.state.store.columns_numpy import BLOCK_HASH_SIZE
from vnext.state.store.inputs import DIGEST_SIZE, Input, are_whole, input_tokens, inputs_in, with_inputs

SIZES = (1, 2, 3, 4, 5, 16)
ROOT = bytes(BLOCK_HASH_SIZE)


def draw(seed: int) -> tuple[np.ndarray, list[Input]]:
    """A prompt with two inputs, which may be neighbours."""
    rng = np.random.default_rng(seed)
    first, gap, lengths = int(rng.integers(0, 10)), int(rng.integers(0, 3)), rng.integers(4, 9, 2).tolist()
    starts = first, first + lengths[0] + gap
    inputs = [Input(start, length, rng.bytes(DIGEST_SIZE)) for start, length in zip(starts, lengths)]
    return with_inputs(rng.integers(0, 9, 40).astype(np.int32), inputs), inputs


@pytest.mark.parametrize("seed", range(40))
def test_a_prompt_tells_its_inputs(seed: int) -> None:
    tokens, inputs = draw(seed)
    assert inputs_in(tokens) == inputs and are_whole(tokens) and inputs_in(np.maximum(tokens, 0)) == []
    start = inputs[0].start
    broken = [tokens[start + 1 :], np.delete(tokens, start), tokens[: start + 3], np.append(tokens, np.int32(-1))]
    swapped = tokens.copy()
    swapped[[start, start + 1]] = swapped[[start + 1, start]]
    assert not any(map(are_whole, (*broken, swapped)))


@pytest.mark.parametrize("seed", range(40))
def test_names_tell_inputs_apart_as_soon_as_a_block_holds_a_part(seed: int) -> None:
    tokens, (one, other) = draw(seed)
    for bit in (0, 29, 30, 90, 119):
        digest = (int.from_bytes(one.digest, "little") ^ 1 << bit).to_bytes(DIGEST_SIZE, "little")
        changed = with_inputs(tokens, [one._replace(digest=digest), other])
        for size in SIZES:
            names, others = (block_hashes(ROOT, each.tobytes(), size) for each in (tokens, changed))
            assert [a == b for a, b in zip(names, others)] == [at < one.start // size for at in range(len(names))]
            assert names == columns_numpy.block_hashes(ROOT, tokens.tobytes(), size)
            for count in range(len(names) + 2):
                assert leading_hashes(ROOT, tokens.tobytes(), size, count) == names[:count]


def test_no_salt_spells_a_block_with_the_rest_of_a_digest() -> None:
    for size in SIZES:
        tokens = np.concatenate((np.zeros(max(size - 1, 0), np.int32), np.full(4, ord("a") * 0x01010101, np.int32)))
        for more in range(4):
            salt = ("\0" * BLOCK_HASH_SIZE).encode() + tokens[: size + more].tobytes()
            assert root_hash(salt.decode(), size) != columns_numpy.blake2b(salt, digest_size=BLOCK_HASH_SIZE).digest()


def test_an_input_has_tokens_enough_for_its_digest() -> None:
    with pytest.raises(ValueError, match="15 bytes and 4 tokens"):
        input_tokens(bytes(DIGEST_SIZE), 3)
    with pytest.raises(ValueError, match="not 16 and 4"):
        input_tokens(bytes(16), 4)
