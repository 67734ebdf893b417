"""Block hashes: a block's hash is a digest of every token up to the end of the block.

hash(block i) = blake2b-128(hash(block i - 1) || tokens of block i), starting from a root made of the cache salt. The
digest is cryptographic because a client that could make two prompts collide could read another client's cache. Salts
and blocks are hashed in different domains. Otherwise a salt that spells a hash and a block's tokens would be the root
of another request's blocks. Where an input begins within a block's last tokens, the rest of its digest (store/inputs.py), which
stands in the next block, belongs to the tokens.
"""

from __future__ import annotations

import hashlib

from vnext.state.store import columns
from vnext.state.store.columns_numpy import BLOCK_HASH_SIZE
from vnext.state.store.fields import DIGEST_WORDS

ADAPTER = b"adapter"
"""Personalises the digest of a salt with an adapter; without this, a salt could spell both."""
WEIGHTS = b"weights"
"""Personalises the digest of a root with the weights."""
SALT_LIKE_A_BLOCK = b"cache salt"
"""Personalises the digest of a salt as long as a hash and a block's tokens, with the rest of a digest or without; other lengths
cannot be confused with a block."""


def root_hash(cache_salt: str, block_size: int, adapter: str = "") -> bytes:
    """The parent of a request's first block; requests with different salts or different adapters share nothing."""
    salt = cache_salt.encode()
    if adapter:
        both = hashlib.blake2b(adapter.encode(), digest_size=BLOCK_HASH_SIZE).digest() + salt
        return hashlib.blake2b(both, digest_size=BLOCK_HASH_SIZE, person=ADAPTER).digest()
    lengths = range(BLOCK_HASH_SIZE + 4 * block_size, BLOCK_HASH_SIZE + 4 * (block_size + DIGEST_WORDS), 4)
    person = SALT_LIKE_A_BLOCK if len(salt) in lengths else b""
    return hashlib.blake2b(salt, digest_size=BLOCK_HASH_SIZE, person=person).digest()


def versioned_root(root: bytes, weights: str) -> bytes:
    """The parent of a first block that is computed with other weights than those the engine started with ("")."""
    if not weights:
        return root
    both = hashlib.blake2b(weights.encode(), digest_size=BLOCK_HASH_SIZE).digest() + root
    return hashlib.blake2b(both, digest_size=BLOCK_HASH_SIZE, person=WEIGHTS).digest()


def block_hashes(parent: bytes, tokens: bytes, block_size: int) -> tuple[bytes, ...]:
    """The hashes of all full blocks of a token history (int32 bytes), first to last."""
    return columns.impl.block_hashes(parent, tokens, block_size)


def leading_hashes(parent: bytes, tokens: bytes, block_size: int, count: int) -> tuple[bytes, ...]:
    """The hashes of the first `count` full blocks of a history (int32 bytes), or of all that there are."""
    return block_hashes(parent, tokens[: 4 * (count * block_size + DIGEST_WORDS - 1)], block_size)[:count]
