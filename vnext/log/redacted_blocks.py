"""The hashes of kept blocks in a redacted log: the replacements of the real block hashes.

A page that outlives its request stays in the prefix index, and a snapshot must give its hash in the log. Owns the data
that this needs: the history and pages of each request that leaves. Hashes are computed for a snapshot, of pages that are still
indexed, and when the data exceeds its bound: a request that leaves then has the oldest forgotten, about as much as it adds, so
that no step has the work of many. A step in which no request leaves costs nothing here.

Where windows give pages back while their request lives, the owner of a kept page is unknown; its real hash identifies it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

import numpy as np

from vnext.log import pseudonyms
from vnext.state.block_hash import block_hashes, versioned_root
from vnext.state.config import SchedulerConfig
from vnext.state.preempt import row_tokens
from vnext.state.state import State, label_of, root_of
from vnext.state.store.columns_numpy import BLOCK_HASH_SIZE, group_hash
from vnext.state.windows import row_blocks

LEFT_TOKENS_MAX = 1 << 22
LEFT_OVERHEAD_TOKENS = 128
"""The memory for a request beside its tokens, half a kilobyte, counted in tokens; it matters for many short requests."""
NOBODY = -1


class Roots(NamedTuple):
    """The start of a request's history: the secret of its pseudonyms, and the parent hash of its first block in the log."""

    secret: bytes
    key: bytes


class _Left(NamedTuple):
    """A request that left its row: its real root hash, the label of the `weights`, its known tokens (int32 bytes), its pages
    (int32[n]), and its memory, in tokens (`cost`)."""

    roots: Roots
    root: bytes
    weights: str
    tokens: bytes
    blocks: np.ndarray
    cost: int


class RedactedBlocks:
    """The redacted hashes of one engine's blocks. Mutable: call `leave` for each row before it leaves."""

    def __init__(self, config: SchedulerConfig, history: Callable[[bytes, bytes], bytes]) -> None:
        """`history(secret, tokens)`: the pseudonyms of a whole history (int32 bytes) with this root secret."""
        self._config = config
        self._size = config.block_size
        self._naming = config.prefix_caching
        self._history = history
        self._keys = np.zeros((config.page_count, BLOCK_HASH_SIZE), dtype=np.uint8)
        self._owner = np.full(config.page_count, NOBODY, dtype=np.int64)
        self._left: dict[int, _Left] = {}
        self._left_tokens = self._left_count = self._oldest = 0
        self._kept = config.max_num_seqs if config.windows else 0
        """Of the newest in `_left`, how many stay: their last blocks are not hashed yet, and nothing else tells whose they are."""

    def leave(self, state: State, row: int, roots: Roots) -> None:
        """This row is about to end or to be preempted; its pages stay in the cache for a while."""
        if not self._naming:
            return
        root, tokens = root_of(state, state.requests[int(state.rows.id[row])]), row_tokens(state, row)
        cost = len(tokens) + LEFT_OVERHEAD_TOKENS
        left = _Left(roots, root, label_of(state.weights), tokens.tobytes(), row_blocks(state, row).copy(), cost)
        self._owner[left.blocks] = self._left_count
        self._left[self._left_count] = left
        self._left_count += 1
        self._left_tokens += left.cost
        while self._left_tokens > LEFT_TOKENS_MAX and len(self._left) > self._kept:
            self._forget_oldest(state)

    def promoted(self, pages: Iterable[int], keys: tuple[bytes, ...]) -> None:
        """These pages have been read from disk: their hashes in the log."""
        blocks = np.array(tuple(pages), dtype=np.int32)
        self._owner[blocks] = NOBODY
        _write(self._keys, blocks, keys)

    def resume(self, state: State, histories: Iterable[tuple[bytes, Roots, bytes]], key: bytes) -> None:
        """Label the blocks of a state that earlier events led to, from histories (real root hash, roots, int32 bytes).

        A block that is in none of them gets a hash of its real hash under `key`.
        """
        names = {name: block for block, name in enumerate(state.pool.prefix_index.keys()) if name is not None}
        for name, block in names.items():
            self._keys[block] = np.frombuffer(pseudonyms.block_label(key, name), dtype=np.uint8)
        weights = label_of(state.weights)
        for base, roots, tokens in histories if names else ():
            root = versioned_root(base, weights)
            if names.keys() & set(block_hashes(root, tokens, self._size)) or self._config.windows:
                self._write_known(self._keys, state, root, tokens, self.chain(roots, tokens, weights)[1])

    def chain(self, roots: Roots, tokens: bytes, weights: str) -> tuple[bytes, tuple[bytes, ...]]:
        """A history (int32 bytes) as in the log: its pseudonyms, and the hashes of its full blocks."""
        shaped = self._history(roots.secret, tokens)
        return shaped, block_hashes(versioned_root(roots.key, weights), shaped, self._size) if self._naming else ()

    def of(self, state: State, blocks: np.ndarray, hash_chains: list[tuple[bytes, ...]]) -> bytes:
        """The hashes (16 bytes each) of these pages, all indexed; `hash_chains` are those of the state's rows."""
        self._name_left(state, blocks)
        keys = self._keys.copy()
        for row, chain in enumerate(hash_chains):
            if self._config.windows:
                root = root_of(state, state.requests[int(state.rows.id[row])])
                self._write_known(keys, state, root, row_tokens(state, row).tobytes(), chain)
            else:
                _write(keys, row_blocks(state, row), chain)
        return keys.take(blocks, axis=0).tobytes()

    def _write_known(self, keys: np.ndarray, state: State, root: bytes, tokens: bytes, chain: tuple[bytes, ...]) -> None:
        """Write the hashes of the blocks whose real hashes are in this history, regardless of their holder."""
        real = block_hashes(root, tokens, self._size)
        for group in range(self._config.group_count):
            pages = state.pool.prefix_index.blocks_of(group_hash(key, group) for key in real)
            for page, key in zip(pages, chain):
                if page is not None:
                    keys[page] = np.frombuffer(group_hash(key, group), dtype=np.uint8)

    def _forget_oldest(self, state: State) -> None:
        """Write the hashes of the pages of the request that left first; then forget it."""
        number, left = self._oldest, self._pop_oldest()
        if self._config.windows:
            self._name_by_content(state, left)
        else:
            self._name_owned(number, left)

    def _pop_oldest(self) -> _Left:
        left = self._left.pop(self._oldest)
        self._oldest += 1
        self._left_tokens -= left.cost
        return left

    def _name_left(self, state: State, named: np.ndarray) -> None:
        """Write the hashes of indexed pages that belong to requests that have left. Without owners these are forgotten too, except
        for the newest; with owners they have none any more, and are forgotten in time."""
        if self._config.windows:
            for left in self._left.values():
                self._name_by_content(state, left)
            while len(self._left) > self._kept:
                self._pop_oldest()
            return
        for number in np.unique(self._owner[named]).tolist():
            if number != NOBODY:
                self._name_owned(number, self._left[number])
        self._owner[:] = NOBODY

    def _name_owned(self, number: int, left: _Left) -> None:
        own = self._owner[left.blocks] == number
        if own.any():
            _, chain = self.chain(left.roots, left.tokens, left.weights)
            _write(self._keys, np.where(own, left.blocks, NOBODY), chain)
            self._owner[left.blocks[own]] = NOBODY

    def _name_by_content(self, state: State, left: _Left) -> None:
        _, chain = self.chain(left.roots, left.tokens, left.weights)
        self._write_known(self._keys, state, left.root, left.tokens, chain)


def hash_after(root_and_keys: tuple[bytes, tuple[bytes, ...]], hashed_blocks: int) -> bytes:
    """The hash of a history's last hashed block; the root's if no block is hashed."""
    root, keys = root_and_keys
    return keys[hashed_blocks - 1] if keys and hashed_blocks else root


def _write(keys: np.ndarray, blocks: np.ndarray, chain: tuple[bytes, ...]) -> None:
    """Write the hashes of a history's full blocks, except for entries that are NOBODY."""
    names = np.frombuffer(b"".join(chain), dtype=np.uint8).reshape(-1, BLOCK_HASH_SIZE)[: len(blocks)]
    places = blocks[: len(names)]
    keys[places[places != NOBODY]] = names[places != NOBODY]
