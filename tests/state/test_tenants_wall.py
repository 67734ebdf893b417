"""The wall between tenants: requests with different cache salts share nothing, whatever the salts are; with equal ones, all.

Salts of any length and shape: with common beginnings and ends, empty, very long, with zero bytes, in several spellings of
one letter, and such as spell what else is hashed: keys, roots, tokens, other salts. In plain and compiled forms.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator

import pytest
from core_drive import Engine, arrival_of

from vnext.log import pseudonyms
from vnext.replay.answers.arrivals import _prefix_keys
from vnext.state import block_hash
from vnext.state.block_hash import BLOCK_HASH_SIZE, block_hashes, root_hash
from vnext.state.events import pack_tokens
from vnext.state.store import columns, columns_numpy, prefix_index, prefix_index_plain

BLOCK = 4
PROMPT = [5, 6, 7, 8, 9, 10, 11, 12, 13]
LENGTHS = (1, 2, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 255, 256, 257, 1000)
"""About the sizes of keys, digests and blocks of hash functions."""


@pytest.fixture(params=["compiled", "plain"])
def form(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "plain":
        monkeypatch.setattr(columns, "impl", columns_numpy)
        monkeypatch.setattr(prefix_index, "impl", prefix_index_plain)
    elif columns.impl is columns_numpy or prefix_index.impl is prefix_index_plain:
        pytest.skip("the compiled forms were not built: run python setup.py build_ext --inplace")
    return request.param


def long_relatives() -> Iterator[str]:
    """Salts that differ in one place only, behind or before a common part of any length."""
    for length in LENGTHS:
        common = "tenant-" * (length // 7) + "t" * (length % 7)
        yield from (common + "a", common + "b", "a" + common, "b" + common, common)


def spellings() -> Iterator[str]:
    """Salts that an encoding, a comparison or a terminator might take for one another."""
    yield from ("", "\0", "\0\0", "a", "a\0", "a\0b", "\0a", "A", "a ", " a", "a\n", "None", "null", "0", "00", "b''", "''")
    yield from ("\u00e9", "e\u0301", "\u212b", "\u00c5", "\ufb01", "fi", "\U0001f600", "\U0001f601", "\u200b", "\ufeff")
    yield from ("x" * 100_000, "x" * 100_001, "x" * 99_999 + "y")


def other_fields() -> Iterator[str]:
    """Salts that spell what else goes into a block's name: tokens, keys, roots, labels, as bytes and in hexadecimal."""
    tokens = pack_tokens(PROMPT)
    yield from (tokens[:length].decode() for length in (4, 8, 12, 16, 20, 32, len(tokens)))
    for salt in ("", "a"):
        key = root_hash(salt, BLOCK)
        for data in (key, *block_hashes(key, tokens, BLOCK)):
            yield from (data.hex(), data.decode("latin-1"), data.hex() + salt, salt + data.hex())
    yield from (block_hash.SALT_LIKE_A_BLOCK.decode(), "salt", "root", "next", "r0", "r1")


def random_salts(seed: int, count: int) -> Iterator[str]:
    rng = random.Random(seed)
    for _ in range(count):
        letters = rng.choice(["ab", "\0\x01", "abcdefghij", "\u00e9e\u0301", "\U0001f600x"])
        yield "".join(rng.choice(letters) for _ in range(rng.choice(LENGTHS[:-3])))


def all_salts() -> list[str]:
    return list(dict.fromkeys((*long_relatives(), *spellings(), *other_fields(), *random_salts(7, 120))))


def hit(engine: Engine, salt: str, prompt: list[int] = PROMPT) -> int:
    """Tokens that a request with this salt finds; it comes and goes."""
    before = engine.state.counters.prefix_hit_tokens
    engine.arrive(prompt, max_tokens=1, cache_salt=salt)
    engine.run_out()
    return engine.state.counters.prefix_hit_tokens - before


def test_no_two_salts_share_and_each_finds_its_own(form: str) -> None:
    """One engine that keeps everything: the second half of the test is what makes the first one mean something."""
    salts = all_salts()
    engine = Engine(page_count=4 * len(salts) + 4)
    for salt in salts:
        assert hit(engine, salt) == 0, f"a salt of {len(salt)} letters that begins {salt[:40]!r} finds another's blocks"
    for salt in reversed(salts):
        assert hit(engine, salt) == 8, f"a salt of {len(salt)} letters that begins {salt[:40]!r} does not find its own"


def test_roots_and_keys_differ_for_all_salts(form: str) -> None:
    salts, tokens = all_salts(), pack_tokens(PROMPT)
    for size in (1, 2, 4):
        roots = [root_hash(salt, size) for salt in salts]
        keys = [key for root in roots for key in block_hashes(root, tokens, size)]
        assert len({*roots, *keys}) == len(roots) + len(keys)
        assert {len(key) for key in (*roots, *keys)} == {BLOCK_HASH_SIZE}


@pytest.mark.parametrize("size", [1, 2, 4, 16])
def test_a_salt_that_spells_a_key_and_a_block_is_no_place_in_that_chain(size: int) -> None:
    """Without a mark of its own such a salt is the root behind another's block: that one's next block would be its first."""
    rng = random.Random(size)
    tokens = pack_tokens([rng.randrange(128) for _ in range(200_000 * size)])
    keys = block_hashes(root_hash("", size), tokens, size)
    at, salt = next(found for at, key in enumerate(keys) if (found := (at, as_text(key)))[1])
    block = tokens[(at + 1) * 4 * size : (at + 2) * 4 * size]
    salt += block.decode()
    assert salt.encode() == keys[at] + block and len(salt.encode()) == BLOCK_HASH_SIZE + 4 * size
    assert hashlib.blake2b(salt.encode(), digest_size=BLOCK_HASH_SIZE).digest() == keys[at + 1], (
        "it spells a key of the chain"
    )
    assert root_hash(salt, size) != keys[at + 1]


def as_text(key: bytes) -> str:
    """The key as a salt may spell it, "" where no salt can."""
    try:
        return key.decode()
    except UnicodeDecodeError:
        return ""


@pytest.mark.parametrize("size", [1, 4, 16])
def test_usual_salts_have_the_roots_that_older_logs_were_written_with(size: int) -> None:
    """What a log without texts calls a salt (16 letters) is never as long as a key and a block."""
    for salt in ("", "a", "tenant-7", "0123456789abcdef", "x" * 100):
        assert root_hash(salt, size) == hashlib.blake2b(salt.encode(), digest_size=16).digest()
    assert len(pseudonyms.salt_label(bytes(16), "any")) == 16 < BLOCK_HASH_SIZE + 4


def test_a_log_without_texts_keeps_the_wall() -> None:
    """Labels and secrets differ for different salts, and are equal for equal ones; none stays none."""
    salts, key = all_salts(), bytes(range(16))
    assert len({pseudonyms.salt_label(key, salt) for salt in salts}) == len(salts)
    assert len({pseudonyms.root_secret(key, salt) for salt in salts}) == len(salts)
    assert [salt for salt in salts if pseudonyms.salt_label(key, salt) == ""] == [""]
    assert all(pseudonyms.salt_label(key, salt) == pseudonyms.salt_label(key, salt[:1] + salt[1:]) for salt in salts)


def test_an_exported_prefix_belongs_to_one_salt() -> None:
    """A salt that ends in what looks like a terminator and tokens is not the same prefix as one without."""
    pairs = [("", [0x61, 5, 6]), ("\0a\0\0", [5, 6]), ("\0", [5, 6]), ("a\0", [5]), ("a", [5])]
    found = [key for salt, prompt in pairs for key in _prefix_keys(arrival_of(0, prompt, cache_salt=salt))]
    assert len(set(found)) == len(pairs)
