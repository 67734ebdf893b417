"""Meeting: what the ranks of one engine report to each other while they start, before they share memory.

Owns a folder with one file for each word. A word is written once and appears as a whole. Needs no torch; torch.distributed, where
it serves, meets in the same folder.
"""

from __future__ import annotations

import os
import time
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch.distributed import Store

TIMEOUT = timedelta(minutes=5)
POLL_S = 0.001


class Words(Protocol):
    """Words by topic, as every rank reads them; a store of torch.distributed is one."""

    def set(self, topic: str, word: str) -> None:
        """Report a word to all ranks."""

    def get(self, topic: str) -> bytes:
        """The word on a topic, once a rank has reported it. Raises when TIMEOUT is over."""


class Meeting:
    """Words in a folder, which is fresh for each start."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(exist_ok=True)
        self._folder = folder

    def set(self, topic: str, word: str) -> None:
        draft = self._folder / f".{topic}"
        draft.write_text(word)
        os.replace(draft, self._folder / topic)

    def get(self, topic: str) -> bytes:
        end_s = time.monotonic() + TIMEOUT.total_seconds()
        while True:
            try:
                return (self._folder / topic).read_bytes()
            except FileNotFoundError:
                if time.monotonic() > end_s:
                    raise TimeoutError(f"no rank has reported on {topic!r} within {TIMEOUT}") from None
            time.sleep(POLL_S)

    def torch_store(self, name: str, world_size: int) -> Store:
        """What torch.distributed calls a meeting, by its name; once on each rank."""
        import torch.distributed as dist  # most ranks do without

        store: Store = dist.FileStore(str(self._folder / f"{name}.store"), world_size)
        store.set_timeout(TIMEOUT)
        return store


def tell_all(words: Words, topic: str, rank: int, world_size: int, word: str) -> list[str]:
    """Every rank's word on a topic, in rank order, once all ranks have reported."""
    words.set(f"{topic} of rank {rank}", word)
    return [words.get(f"{topic} of rank {each}").decode() for each in range(world_size)]
