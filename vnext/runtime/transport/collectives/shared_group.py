"""Collectives over shared memory: the ranks of one machine sum and join their tensors with the fewest copies.

Owns the protocol; exchange_plain.py or its compiled implementation operates on the memory. A tensor goes in pieces of one slot.
For each piece every rank enters its part and then
    one-shot    adds all ranks' parts itself: one meeting, for small pieces
    two-shot    adds its share of the elements, and takes the other shares from the ranks that added them: two meetings
Either way an element is summed by one tree in float32 and rounded once: the same bits on every rank, in both forms, at any
speed. If a rank ends, for any reason, the others report it within LIVENESS_POLL_S.
"""

from __future__ import annotations

import re
from contextlib import suppress
from typing import TYPE_CHECKING

from vnext.kernels.arrays import dtype_name, host_dtype
from vnext.runtime.processes.thread_plan import ranks_spin_us
from vnext.runtime.transport.collectives.errors import GaveUp, RankLost
from vnext.runtime.transport.collectives.exchange_memory import Exchange
from vnext.runtime.transport.collectives.exchange_plain import ADDED, ANY_KIND, NOBODY, Rows, is_before

if TYPE_CHECKING:
    import torch

CAPACITY_BYTES_DEFAULT = 2**20
ONE_SHOT_BYTES_MAX = {True: 2**14, False: 2**16}  # by whether ranks spin, measured: sleepers pay more for a second meeting
LIVENESS_POLL_S = 0.1
TIMEOUT_S = 3600.0  # for a rank that lives but does not come; the engine core's bound (progress.py) ends this earlier

GIVEN_UP = ANY_KIND + 1
"""The kind of an operation in which a rank takes no part."""
GAVE_UP = re.compile(rf"rank (\d+) with 0 of kind {GIVEN_UP}$")
_KINDS = {name: kind for kind, name in enumerate(ADDED)}
_ITEM_BYTES = tuple(host_dtype(name).itemsize for name in ADDED)
_TICKS_MASK = 0xFFFFFFFF
_NANOSECONDS = 1e9


def default_one_shot_bytes_max(world_size: int) -> int:
    """The largest piece that each rank adds by itself. Rank 0 decides, since ranks may see different cores."""
    return ONE_SHOT_BYTES_MAX[ranks_spin_us(world_size) > 0]


class SharedGroup:
    """One rank's collectives. Every rank calls the same ones in the same order with equal shapes; one thread uses it."""

    can_capture = False

    def __init__(self, exchange: Exchange, rank: int, spin_us: float | None = None) -> None:
        """Takes over the exchange."""
        self._exchange, self._memory = exchange, exchange.memory
        self._rank, self._world_size = rank, exchange.world_size
        self._capacity_bytes = exchange.capacity_bytes
        self._one_shot_bytes_max = exchange.one_shot_bytes_max
        self._spin_ns = int((ranks_spin_us(self._world_size) if spin_us is None else spin_us) * 1e3)
        self._operation = 0
        self._ticks = 0

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """The sum over ranks in the dtype of `tensor` (float32, bfloat16, float16), which is changed in place where it is
        contiguous. Raises RankLost, and ValueError where ranks came with different sizes."""
        total = tensor.contiguous()
        self.sum_at(dtype_name(tensor.dtype), total.data_ptr(), total.nbytes)
        return total

    def sum_at(self, dtype: str, at: int, size_bytes: int) -> None:
        """As all_reduce, in place, of `size_bytes` at this address."""
        if (kind := _KINDS.get(dtype)) is None:
            raise TypeError(f"{dtype} is not added over ranks; there are: {', '.join(ADDED)}")
        for done in range(0, size_bytes, self._capacity_bytes):
            self._reduce_piece(kind, at + done, min(size_bytes - done, self._capacity_bytes))

    def all_gather(self, tensor: torch.Tensor, dim: int) -> torch.Tensor:
        """The ranks' tensors of any dtype joined along `dim` in rank order. Raises as all_reduce does."""
        part = tensor.contiguous()
        shape = list(part.shape)
        row_bytes = part.itemsize
        for length in shape[dim % part.dim() :]:
            row_bytes *= length
        shape[dim] *= self._world_size
        joined = part.new_empty(shape)
        self.join_at(part.data_ptr(), joined.data_ptr(), part.nbytes, row_bytes)
        return joined

    def join_at(self, part: int, joined: int, size_bytes: int, row_bytes: int) -> None:
        """Join the rows of the ranks' parts, of `size_bytes` each at the address `part`, one beside the other at `joined`."""
        for done in range(0, size_bytes, self._capacity_bytes):
            self._gather_piece(part, joined, done, min(size_bytes - done, self._capacity_bytes), row_bytes)

    def agree(self) -> None:
        """Meet all ranks behind a step that this one has computed. Raises GaveUp, RankLost."""
        self._enter(ANY_KIND, 0, 0)

    def give_up(self) -> None:
        """In place of the next operation, tell the other ranks that this one lacks memory for it: they raise GaveUp there. Raises
        RankLost."""
        with suppress(GaveUp):
            self._enter(GIVEN_UP, 0, 0)

    def require_whole(self) -> None:
        """Does nothing: the collectives themselves have raised any error."""

    def ended(self) -> list[int]:
        """Other ranks that have ended or left the group."""
        others = [rank for rank in range(self._world_size) if rank != self._rank]
        return [rank for rank in others if not self._exchange.liveness.has_owner(rank)]

    def close(self) -> None:
        """Leave the group: ranks that wait for this one get RankLost. Idempotent."""
        self._exchange.close()

    def _reduce_piece(self, kind: int, address: int, size_bytes: int) -> None:
        item_bytes = _ITEM_BYTES[kind]
        count = size_bytes // item_bytes
        self._enter(kind, address, size_bytes)
        if size_bytes <= self._one_shot_bytes_max:
            self._memory.add(self._operation, kind, 0, count, address)
            return
        bounds = [count * rank // self._world_size for rank in range(self._world_size + 1)]
        shares = list(zip(bounds, bounds[1:]))
        start, stop = shares[self._rank]
        self._memory.add(self._operation, kind, start, stop - start, 0)
        self._ticks = self._ticks + 1 & _TICKS_MASK
        self._memory.tick(self._ticks)
        self._meet(kind, size_bytes)
        row = Rows(address, size_bytes, size_bytes)
        for rank, (start, stop) in enumerate(shares):
            at, here_bytes = start * item_bytes, (stop - start) * item_bytes
            self._memory.take(self._operation, rank, at, here_bytes, at, row)

    def _gather_piece(self, source: int, target: int, done: int, size_bytes: int, row_bytes: int) -> None:
        self._enter(ANY_KIND, source + done, size_bytes)
        for rank in range(self._world_size):
            rows = Rows(target + rank * row_bytes, row_bytes, row_bytes * self._world_size)
            self._memory.take(self._operation, rank, 0, size_bytes, done, rows)

    def _enter(self, kind: int, address: int, size_bytes: int) -> None:
        """Begin the next operation and wait until every rank has entered it."""
        self._operation += 1
        self._ticks = self._ticks + 1 & _TICKS_MASK
        self._memory.enter(self._operation, self._ticks, kind, address, size_bytes)
        try:
            self._meet(kind, size_bytes)
        except ValueError as error:  # the tickets of this operation differ
            if (who := GAVE_UP.search(str(error))) is None and kind != GIVEN_UP:
                raise
            raise GaveUp(f"rank {who[1] if who else self._rank} lacks memory") from error

    def _meet(self, kind: int, size_bytes: int) -> None:
        """Wait until every rank has ticked as often as this one."""
        wait = (self._operation, self._ticks, kind, size_bytes)
        poll_ns = int(LIVENESS_POLL_S * _NANOSECONDS)
        if self._memory.await_all(*wait, self._spin_ns, poll_ns) == NOBODY:
            return
        waited_s = 0.0
        self._require_liveness()
        while (missing := self._memory.await_all(*wait, 0, poll_ns)) != NOBODY:
            self._require_liveness()
            waited_s += LIVENESS_POLL_S  # no clock: time during which this rank itself was stopped does not count
            if waited_s > TIMEOUT_S:
                raise RankLost(f"rank {missing} did not come within {TIMEOUT_S:.0f} s; is it stuck?")

    def _require_liveness(self) -> None:
        """Raise RankLost for ranks that ended before they ticked. Reads a rank's end first, then its last tick."""
        lost = [rank for rank in self.ended() if is_before(self._memory.ticks(rank), self._ticks)]
        if lost:
            raise RankLost(f"rank {lost[0]} has ended or left the group before all ranks had met")
