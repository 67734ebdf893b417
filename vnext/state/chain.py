"""Chain keys: the name of a block's content is a digest of every token up to its end.

key(block i) = blake2b-128(key(block i - 1) || tokens of block i), starting from a root made of the cache salt. A
cryptographic digest, because a client who could make two prompts collide would read another client's cache.
"""

from __future__ import annotations

import hashlib

from vnext.state import columns
from vnext.state.columns_numpy import KEY_SIZE


def root_key(cache_salt: str) -> bytes:
    """The parent of a request's first block; requests with different salts share nothing."""
    return hashlib.blake2b(cache_salt.encode(), digest_size=KEY_SIZE).digest()


def chain_keys(parent: bytes, tokens: bytes, block_size: int) -> tuple[bytes, ...]:
    """Keys of all full blocks of a token history (int32 bytes), first to last."""
    return columns.kernels.chain(parent, tokens, block_size)
