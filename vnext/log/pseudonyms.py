"""Pseudonyms: token ids replaced so that the text is gone and equal prefixes stay equal. Pure arithmetic on arrays.

Every position has a secret, made from a key that is never written, all tokens before the position, and the cache salt.
Under the secret, a permutation of [0, base) maps the token, and the result is moved to [base, 2 base). Two histories
therefore have equal pseudonyms exactly as far as they are equal: prefix hits are neither lost nor invented.
Secrets of blocks come from keyed blake2b: guessing the text of one block reveals nothing about another. Within a block
a multiplicative mixer (after splitmix64) is sufficient and fast. Lengths and equal prefixes remain visible.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable

import numpy as np

from vnext.state.events import pack_tokens, unpack_tokens
from vnext.state.store.inputs import DIGEST_SIZE, has_inputs, inputs_in, rows_of, with_inputs, with_rows

KEY_SIZE_BYTES = 16
SECRET_SIZE_BYTES = 16
GOLDEN = np.uint64(0x9E3779B97F4A7C15)
STRIDE = np.uint64(0xD1342543DE82EF95)
FACTOR_0 = np.uint64(0xBF58476D1CE4E5B9)
FACTOR_1 = np.uint64(0x94D049BB133111EB)
ONE = np.uint64(1)
SHIFTS = np.array([30, 27, 31], dtype=np.uint64)


def root_secret(key: bytes, cache_salt: str) -> bytes:
    """The secret of a request's first block (16 bytes)."""
    return hashlib.blake2b(b"root" + cache_salt.encode(), key=key, digest_size=SECRET_SIZE_BYTES).digest()


def child_secret(key: bytes, parent: bytes, tokens: bytes) -> bytes:
    """The secret of the block after a full one (its tokens as int32 bytes)."""
    return hashlib.blake2b(b"next" + parent + tokens, key=key, digest_size=SECRET_SIZE_BYTES).digest()


def salt_label(key: bytes, cache_salt: str) -> str:
    """A label that is equal exactly for equal salts (except with odds 2^-64 a pair). An empty salt stays empty."""
    return hashlib.blake2b(b"salt" + cache_salt.encode(), key=key, digest_size=8).hexdigest() if cache_salt else ""


def client_label(key: bytes, client: int) -> int:
    """The number of a client under a log's key: equal exactly for equal clients (except with odds 2^-63 a pair); 0 stays 0."""
    if not client:
        return 0
    digest = hashlib.blake2b(b"client" + client.to_bytes(8, "little"), key=key, digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def block_label(key: bytes, name: bytes) -> bytes:
    """The label (16 bytes) of a block whose content is in no known history."""
    return hashlib.blake2b(b"name of a block" + name, key=key, digest_size=SECRET_SIZE_BYTES).digest()


def around_inputs(key: bytes, base: int, tokens: bytes, replace: Callable[[bytes], bytes]) -> bytes:
    """What `replace` makes of a history (int32 bytes), which gets tokens of [0, base) only; inputs become inputs with digests under
    the key, equal exactly for equal ones, and lie in one row, or in none as before."""
    if not has_inputs(tokens):
        return replace(tokens)
    read = unpack_tokens(tokens)
    shaped = unpack_tokens(replace(pack_tokens(np.where(read < 0, ~read % base, read))))

    def labelled(digest: bytes) -> bytes:
        return with_rows(hashlib.blake2b(b"input" + digest, key=key, digest_size=DIGEST_SIZE).digest(), min(rows_of(digest), 1))

    return pack_tokens(with_inputs(shaped, [each._replace(digest=labelled(each.digest)) for each in inputs_in(read)]))


def name_key_file(log_folder: str) -> str:
    """The path of the file beside a log's folder that holds the key of its names (in hexadecimal)."""
    return f"{log_folder}.key"


def name_label(key: bytes, name: str) -> str:
    """The label of a request whose name may not be logged: 16 letters, equal for equal names under one key.

    The number after the last dash is kept, because it distinguishes the answers of one API request.
    """
    base, dash, place = name.rpartition("-")
    if not (dash and place.isdecimal() and place.isascii()):
        base, dash, place = name, "", ""
    return hashlib.blake2b(b"name" + base.encode(), key=key, digest_size=8).hexdigest() + dash + place


def block_secrets(key: bytes, root: bytes, tokens: bytes, block_size: int) -> list[bytes]:
    """The secrets of all blocks of a history (int32 bytes), including the one after its last full block."""
    secrets, width = [root], 4 * block_size
    for end in range(width, len(tokens) + 1, width):
        secrets.append(child_secret(key, secrets[-1], tokens[end - width : end]))
    return secrets


def words(secrets: list[bytes]) -> np.ndarray:
    return np.frombuffer(b"".join(secrets), dtype="<u8").reshape(-1, 2)


def mix(values: np.ndarray) -> np.ndarray:
    """A bijective scrambling of uint64 (the finaliser of splitmix64: Steele, Lea and Flood, 2014)."""
    values = (values ^ (values >> SHIFTS[0])) * FACTOR_0
    values = (values ^ (values >> SHIFTS[1])) * FACTOR_1
    mixed: np.ndarray = values ^ (values >> SHIFTS[2])
    return mixed


def absorbed(secrets: np.ndarray, places: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    """The contribution of each token to its block's running sum: uint64 like `tokens`; `places` counts within the block."""
    return mix((tokens.astype(np.uint64) + (places + ONE) * GOLDEN) ^ secrets[..., 0])


def permuted(secrets: np.ndarray, places: np.ndarray, sums: np.ndarray, tokens: np.ndarray, base: int) -> np.ndarray:
    """Tokens under the permutation of their position, as int32 in [base, 2 base). `sums` covers the block before it."""
    keys = mix((sums + places * STRIDE) ^ secrets[..., 1])
    low, half = np.uint64(base - 1), np.uint64((base.bit_length() - 1) // 2)
    values = (tokens.astype(np.uint64) ^ keys) & low
    values = (values * ((keys >> np.uint64(20)) | ONE)) & low
    values ^= values >> half
    values = (values * ((keys >> np.uint64(40)) | ONE)) & low
    values ^= values >> half
    moved: np.ndarray = values + np.uint64(base)
    return moved.astype(np.int32)


def pseudonyms(secrets: np.ndarray, tokens: np.ndarray, block_size: int, base: int) -> tuple[np.ndarray, np.uint64]:
    """A whole history's pseudonyms (int32 like `tokens`) and the running sum of its last, unfinished block.

    `secrets` is uint64[tokens // block_size + 1, 2].
    """
    places, blocks = _places(len(tokens), block_size)
    secrets_of = secrets[blocks]
    added = absorbed(secrets_of, places, tokens)
    running = np.concatenate([np.zeros(1, dtype=np.uint64), np.cumsum(added, dtype=np.uint64)])
    starts = running[blocks.astype(np.int64) * block_size]
    result = permuted(secrets_of, places, running[:-1] - starts, tokens, base)
    last = len(tokens) // block_size * block_size
    return result, np.sum(added[last:], dtype=np.uint64)


def _places(count: int, block_size: int) -> tuple[np.ndarray, np.ndarray]:
    """The place within its block (uint64[count]) and the block (int64[count]) of each position."""
    positions = np.arange(count, dtype=np.int64)
    return (positions % block_size).astype(np.uint64), positions // block_size
