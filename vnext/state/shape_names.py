"""Names of kept blocks in a log without texts: what the chain keys of real tokens are called there.

A block that outlives its request keeps its name, and a keyframe must say which name that is in the log. Owns what is
remembered for it: of a request that leaves, its history and its blocks; names are made only when a keyframe asks, and
only for blocks that still have one. A step without a request that leaves costs nothing here.

Where windows give blocks back while their request lives on, nobody can say whose a kept block was: its real name tells.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from vnext.state.chain import KEY_SIZE, chain_keys
from vnext.state.columns_numpy import group_key
from vnext.state.config import SchedulerConfig
from vnext.state.keyframe import blocks_with_names
from vnext.state.planning import row_tokens
from vnext.state.state import State
from vnext.state.tails import Tails
from vnext.state.windows import row_blocks

LEFT_TOKENS_MAX = 1 << 22
NOBODY = -1


class Roots(NamedTuple):
    """Where a request's history begins: the secret of its pseudonyms, the parent key of its first block in the log."""

    secret: bytes
    key: bytes


class _Left(NamedTuple):
    """A request that left its row: its root's real key, its known tokens (int32 bytes) and its blocks (int32[n])."""

    roots: Roots
    root: bytes
    tokens: bytes
    blocks: np.ndarray


class Names:
    """The log's names of one engine's blocks. Mutable: told of each row before it leaves."""

    def __init__(self, config: SchedulerConfig, tails: Tails) -> None:
        self._config = config
        self._size = config.block_size
        self._naming = config.prefix_caching
        self._tails = tails
        self._keys = np.zeros((config.block_count, KEY_SIZE), dtype=np.uint8)
        self._owner = np.full(config.block_count, NOBODY, dtype=np.int64)
        self._left: dict[int, _Left] = {}
        self._left_tokens = self._left_count = 0

    def leave(self, state: State, row: int, roots: Roots) -> None:
        """This row is about to end or to give way; its blocks stay as they are for a while."""
        if not self._naming:
            return
        root = state.requests[int(state.rows.id[row])].root
        left = _Left(roots, root, row_tokens(state, row).tobytes(), row_blocks(state, row).copy())
        self._owner[left.blocks] = self._left_count
        self._left[self._left_count] = left
        self._left_count += 1
        self._left_tokens += len(left.tokens) // 4
        if self._left_tokens > LEFT_TOKENS_MAX:
            self._name_left(state, blocks_with_names(state.pool.names.keys()))

    def chain(self, roots: Roots, tokens: bytes) -> tuple[bytes, tuple[bytes, ...]]:
        """A history (int32 bytes) as the log has it: pseudonyms, and the names of its full blocks."""
        shaped = self._tails.history(roots.secret, tokens)
        return shaped, chain_keys(roots.key, shaped, self._size) if self._naming else ()

    def of(self, state: State, blocks: np.ndarray, chains: list[tuple[bytes, ...]]) -> bytes:
        """The names of these blocks, all that have one (16 bytes each); `chains` are those of the state's rows."""
        self._name_left(state, blocks)
        keys = self._keys.copy()
        for row, chain in enumerate(chains):
            if self._config.windows:
                root = state.requests[int(state.rows.id[row])].root
                self._write_known(keys, state, root, row_tokens(state, row).tobytes(), chain)
            else:
                _write(keys, row_blocks(state, row), chain)
        return keys[blocks].tobytes()

    def _write_known(self, keys: np.ndarray, state: State, root: bytes, tokens: bytes, chain: tuple[bytes, ...]) -> None:
        """The names of those blocks whose real names are those of this history, whoever holds or held them."""
        real = chain_keys(root, tokens, self._size)
        for group in range(self._config.group_count):
            pages = state.pool.names.blocks_of(group_key(key, group) for key in real)
            for page, key in zip(pages, chain):
                if page is not None:
                    keys[page] = np.frombuffer(group_key(key, group), dtype=np.uint8)

    def _name_left(self, state: State, named: np.ndarray) -> None:
        """Name what left requests own of the blocks that have a name; forget the requests."""
        if self._config.windows:
            self._name_left_by_content(state)
            return
        for number in np.unique(self._owner[named]).tolist():
            if number != NOBODY:
                left = self._left[number]
                own = self._owner[left.blocks] == number
                _, chain = self.chain(left.roots, left.tokens)
                _write(self._keys, np.where(own, left.blocks, NOBODY), chain)
        self._owner[:] = NOBODY
        self._left, self._left_tokens = {}, 0

    def _name_left_by_content(self, state: State) -> None:
        """The same where blocks have no owner. Those that leave just now are kept: their last blocks are not named yet."""
        for left in self._left.values():
            _, chain = self.chain(left.roots, left.tokens)
            self._write_known(self._keys, state, left.root, left.tokens, chain)
        self._left = dict(list(self._left.items())[-self._config.running_max :])
        self._left_tokens = 0


def key_after(root_and_keys: tuple[bytes, tuple[bytes, ...]], sealed: int) -> bytes:
    """The key of a history's last sealed block; its root's where none is sealed or blocks have no names."""
    root, keys = root_and_keys
    return keys[sealed - 1] if keys and sealed else root


def _write(keys: np.ndarray, blocks: np.ndarray, chain: tuple[bytes, ...]) -> None:
    """The names of a history's full blocks, but for those that are NOBODY."""
    names = np.frombuffer(b"".join(chain), dtype=np.uint8).reshape(-1, KEY_SIZE)[: len(blocks)]
    places = blocks[: len(names)]
    keys[places[places != NOBODY]] = names[places != NOBODY]
