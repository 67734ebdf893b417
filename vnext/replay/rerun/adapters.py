"""The adapters of a machine: each read from the folder that the log names, when a step first computes with it.

Owns the places of adapters on the shards, which stay; the slots of an engine change. Knows no requests.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from vnext.kernels.thin import ThinBlocks
from vnext.models.config.adapter_config import RANK_MAX
from vnext.models.errors import ModelError
from vnext.models.layers.batch import ForwardBatch
from vnext.models.loading.adapter import load_adapter
from vnext.replay.rerun.numerics import CannotRun
from vnext.replay.rerun.shard import Shard
from vnext.state.state import State


class Adapters:
    """`folders`: where each adapter's files are, by digest."""

    def __init__(self, shards: Sequence[Shard], folders: Mapping[str, str]) -> None:
        self._shards, self._folders = shards, folders
        self._places: dict[str, int] = {}

    def placed(self, batch: ForwardBatch, state: State) -> ForwardBatch:
        """A batch of this state, with the places of its adapters instead of the engine's slots. Raises CannotRun."""
        digests = [slot.digest if slot is not None else "" for slot in state.slots]
        return batch._replace(adapters=tuple(each._replace(slot=self._place(digests[each.slot])) for each in batch.adapters))

    def paired(self, place: int, there: Adapters, weight_of: Callable[[int], int | None]) -> Iterator[tuple[int, ThinBlocks]]:
        """The identity of each product's blocks of the adapter at `place`, with the blocks of the same product on the first rank
        of another machine; `weight_of` gives the identity of a weight there. Raises CannotRun."""
        digest = next(digest for digest, own in self._places.items() if own == place)
        theirs = there._shards[0].adapters[there._place(digest)].blocks
        for key, blocks in self._shards[0].adapters[place].blocks.items():
            if (weight := weight_of(key)) is not None:
                yield id(blocks), theirs[weight]

    def _place(self, digest: str) -> int:
        if digest not in self._places:
            self._load(digest)
            self._places[digest] = len(self._places)
        return self._places[digest]

    def _load(self, digest: str) -> None:
        if digest not in self._folders:
            raise CannotRun(f"the log does not say where the adapter {digest} is: it begins after the adapter was loaded")
        try:
            for shard in self._shards:
                shard.adapters.append(load_adapter(Path(self._folders[digest]), digest, shard.base, RANK_MAX))
        except (ModelError, OSError) as error:
            raise CannotRun(str(error)) from error
