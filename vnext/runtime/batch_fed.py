"""The persistent batch of a device that feeds itself: what a step is told by the host, while the tokens stay where they are.

Owns block tables and last tokens on the device, and the host's part of a step as short arrays. A row that runs ahead of the
state takes the token it sampled last from the device, so nothing waits for it to become known here. Rows and differences are
kept as in `batch.py`, sampling parameters on the device too (`row_parameters.py`): the same oracle holds both batches. The last
row belongs to nobody: padding computes there, and its table leads to a page that nobody holds.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from vnext.kernels.batch_index import BatchOperations
from vnext.models.batch import ForwardBatch, GroupPlaces, HostBatch
from vnext.runtime.batch import PersistentBatch, positions_of
from vnext.runtime.device import Device
from vnext.runtime.row_notes import RowNotes, Wants
from vnext.runtime.row_parameters import RowParameters
from vnext.runtime.staging import Staging
from vnext.state.config import SchedulerConfig
from vnext.state.state import Flight, State, blocks_for


class HostStep(NamedTuple):
    """A step as the host tells it: R entries, T tokens, S samples.

    int64: `begins`, `places` (batch rows) [R], `token_ids` [T] (0 where the device knows better), `ahead` (entries that take
    their row's last token), `sampled` (entries) [S], `asked` (alternatives that each sample reports, -1 none) [S]. int32:
    query_starts [R + 1], contexts [R]. `changes`: what `FedBatch.bring` takes: rows of the table that grew (see
    batch_index.write_spans), and parameters of rows that joined. `width`: blocks of the longest context.
    """

    step: int
    begins: np.ndarray
    places: np.ndarray
    query_starts: np.ndarray
    contexts: np.ndarray
    token_ids: np.ndarray
    ahead: np.ndarray
    sampled: np.ndarray
    changes: dict[str, np.ndarray]
    width: int
    wants: Wants
    asked: np.ndarray

    @property
    def is_decode(self) -> bool:
        """One token an entry, all sampled."""
        return len(self.token_ids) == len(self.begins) == len(self.sampled)

    @property
    def reported(self) -> dict[str, np.ndarray]:
        """Which samples report log-probabilities (int64 [A], among the samples), to be sent; {} for none."""
        return {"reported": np.flatnonzero(self.asked >= 0)} if self.wants.reported else {}


class Samples(NamedTuple):
    """A step's samples on the device, int64: their batch `rows` and `positions` [S], and those that report [A], if any."""

    rows: torch.Tensor
    positions: torch.Tensor
    reported: torch.Tensor | None


class Spans:
    """The `rows` of a PersistentBatch that only notes what grew. `groups` pages lie side by side for each block."""

    def __init__(self, groups: int) -> None:
        self._groups = groups
        self._noted: dict[str, np.ndarray] = {}

    def append(self, places: np.ndarray, held: np.ndarray, counts: np.ndarray, blocks: np.ndarray) -> None:
        """As DeviceRows.append."""
        grown = np.flatnonzero(counts)
        starts = np.zeros(len(grown) + 1, dtype=np.int64)
        np.cumsum(counts[grown] * self._groups, out=starts[1:])
        self._noted = {
            "rows": places[grown], "columns": held[grown] * self._groups, "starts": starts, "values": blocks.astype(np.int32)
        }  # fmt: skip

    def take(self) -> dict[str, np.ndarray]:
        """What was noted since the last time; {} for nothing."""
        noted, self._noted = self._noted, {}
        return noted


class FedBatch(PersistentBatch):
    """Rows of at most `config.running_max` requests, and one more that is nobody's. One thread uses it."""

    def __init__(self, config: SchedulerConfig, vocab_size: int, device: Device, operations: BatchOperations) -> None:
        self._spans = Spans(config.group_count)
        super().__init__(config, vocab_size, device.torch_device, rows=self._spans)
        self._notes = self._sampling = RowNotes(config, vocab_size)
        self.parameters = RowParameters(config.running_max + 1, vocab_size, device.torch_device)
        self.null_row, self._operations = config.running_max, operations
        width = blocks_for(config.model_len_max, config.block_size) * self._groups
        here = device.torch_device
        self.table = torch.zeros((config.running_max + 1, width), dtype=torch.int32, device=here)
        self.table[self.null_row] = config.block_count
        self.last = torch.zeros(config.running_max + 1, dtype=torch.int64, device=here)

    def host_step(self, state: State) -> HostStep:
        """The newest step in flight of `state`. The rows are brought in line with the state first."""
        self._update(state)
        flight = state.flights[-1]
        rows = self._rows_of(state, flight)
        places, ends = self._places[rows], flight.starts + flight.counts
        starts = np.zeros(len(places) + 1, dtype=np.int64)
        np.cumsum(flight.counts, out=starts[1:])
        sampled = np.flatnonzero(flight.samples)
        rows_sampled = places[sampled]
        return HostStep(
            step=flight.step,
            begins=flight.starts,
            places=places,
            query_starts=starts.astype(np.int32),
            contexts=ends.astype(np.int32),
            token_ids=self._token_ids(state, flight, rows, places, positions_of(flight), starts),
            ahead=np.flatnonzero(flight.starts >= state.rows.known[rows]),
            sampled=sampled,
            changes=self._spans.take() | self._notes.take(),
            width=blocks_for(int(ends.max()), self._config.block_size),
            wants=self._notes.wants(rows_sampled, ends[sampled]),
            asked=self._notes.logprobs(rows_sampled),
        )

    def state_rows(self, state: State, flight: Flight) -> np.ndarray | slice:
        """Which rows of the state the entries of its newest step are, after `host_step`."""
        return self._rows_of(state, flight)

    def bring(self, sent: dict[str, torch.Tensor]) -> None:
        """Bring the tables up to date with a step's changes, which were sent."""
        if "rows" in sent:
            self._operations.write_spans(self.table, sent["rows"], sent["columns"], sent["starts"], sent["values"])
        self.parameters.bring(sent)

    def forward(self, step: HostStep, staging: Staging) -> tuple[ForwardBatch, Samples]:
        """The step's tensors and its samples; both are the device's until the staging is released."""
        arrays = {
            "begins": step.begins, "places": step.places, "query_starts": step.query_starts, "token_ids": step.token_ids,
            "ahead_rows": step.places[step.ahead], "ahead_at": step.query_starts[:-1][step.ahead].astype(np.int64),
            "sample_at": step.query_starts[1:][step.sampled].astype(np.int64) - 1, "sampled": step.places[step.sampled],
            "sample_positions": step.contexts[step.sampled].astype(np.int64),
        }  # fmt: skip
        sent = staging.send(arrays | step.changes | step.reported)
        self.bring(sent)
        if len(step.ahead):
            self._operations.place_tokens(self.last, sent["ahead_rows"], sent["ahead_at"], sent["token_ids"])
        positions, contexts, places = self._index(step, sent)
        batch = ForwardBatch(
            sent["token_ids"], positions, places[0].slots, sent["query_starts"], contexts, places[0].block_table,
            sent["sample_at"], host=HostBatch(step.query_starts, step.contexts), groups=tuple(places[1:]),
        )  # fmt: skip
        return batch, Samples(sent["sampled"], sent["sample_positions"], sent.get("reported"))

    def _index(
        self, step: HostStep, sent: dict[str, torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor, list[GroupPlaces]]:
        """Positions [T], context lengths [R], and for each group slots and tables."""
        total, size, groups = len(step.token_ids), self._config.block_size, self._groups
        positions = torch.empty(total, dtype=torch.int64, device=self._device)
        slots, contexts = torch.empty_like(positions), torch.empty(len(step.begins), dtype=torch.int32, device=self._device)
        if groups == 1:
            begins, starts, rows = sent["begins"], sent["query_starts"], sent["places"]
            self._operations.index_tokens(begins, starts, rows, self.table, size, positions, slots, contexts)
            return positions, contexts, [GroupPlaces(slots, self.table[rows, : step.width])]
        counts = (sent["query_starts"][1:] - sent["query_starts"][:-1]).long()
        owner = torch.repeat_interleave(counts, output_size=total)
        torch.arange(total, out=positions)
        positions += (sent["begins"] - sent["query_starts"][:-1])[owner]
        contexts.copy_(sent["begins"] + counts)
        rows = sent["places"][owner]
        return positions, contexts, [
            GroupPlaces(
                decode_slots(self.table, rows, positions, size, group, groups),
                self.table[sent["places"], group : step.width * groups : groups].contiguous(),
            )
            for group in range(groups)
        ]  # fmt: skip

    def remember(self, wants: Wants, rows: torch.Tensor, tokens: torch.Tensor) -> None:
        """What batch rows `rows` sampled (int64 [S] each, on the device) are their last tokens, and seen by those adjusted."""
        self.last.index_copy_(0, rows, tokens)
        if wants.adjusted:
            self.parameters.count(rows, tokens)


def decode_slots(
    table: torch.Tensor, rows: torch.Tensor, positions: torch.Tensor, block_size: int, group: int, groups: int
) -> torch.Tensor:
    """Where tokens at `positions` of batch rows `rows` (int64 [N] each) go in one group of layers: slots int64 [N]."""
    block = torch.div(positions, block_size, rounding_mode="floor")
    page = table.view(-1).index_select(0, rows * table.shape[1] + block * groups + group)
    return page.long() * block_size + (positions - block * block_size)
