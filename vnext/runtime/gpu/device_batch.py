"""The persistent batch of a device that feeds itself: the host sends a step's plan, and the tokens stay on the device.

Owns block tables and last tokens on the device, and the host's part of a step as short arrays. A row that runs ahead of the
state takes its last sampled token from the device, so nothing waits until the host knows it. Rows and differences are kept as
in `batch.py`, and sampling parameters live on the device too (`row_parameters.py`); one oracle checks both batches. The last
row is the null row: padding computes there, and its table leads to a page that no request holds.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch

from vnext.kernels.batch_index import BatchOperations
from vnext.kernels.thin_tiles import ThinTiles, make_tiles
from vnext.models.layers.batch import ForwardBatch, GroupPlaces, HostBatch
from vnext.runtime.batch.batch import adapter_rows
from vnext.runtime.batch.batch_rows import BatchRows, positions_of
from vnext.runtime.batch.draft_batch import DraftBatch
from vnext.runtime.batch.draft_rows import NO_DRAFTS, Drafted, draft_rows
from vnext.runtime.batch.masks import RowMasks
from vnext.runtime.batch.prompts import PromptInputs, prompt_inputs
from vnext.runtime.gpu.adapter_regions import Regions
from vnext.runtime.gpu.device import Device
from vnext.runtime.gpu.row_parameters import RowParameters
from vnext.runtime.gpu.sampling_updates import SamplingUpdates, Wants
from vnext.runtime.gpu.staging import Staging
from vnext.runtime.gpu.unread import LaterDrafts, StepSamples, Unread, with_made
from vnext.sampling.constraint import Vocabulary
from vnext.sampling.inputs import BehindDrafts
from vnext.state.config import SchedulerConfig
from vnext.state.state import State, StepInFlight, blocks_for, sample_points


class HostSamples(NamedTuple):
    """A step's samples as the host sends them, int64 [S] each: their `ids` (of requests), batch `rows` and `positions`, the tokens
    `at` which they are taken, how many drafts each follows (`depths`), and the row that takes each as its last token (`takers`):
    the null row where the host must first see which drafts are kept."""

    ids: np.ndarray
    rows: np.ndarray
    positions: np.ndarray
    at: np.ndarray
    depths: np.ndarray
    takers: np.ndarray


class HostStep(NamedTuple):
    """A step as the host sends it: R entries, T tokens, S samples.

    int64: `begins`, `places` (batch rows) [R], `token_ids` [T] (any where the device has the token), `ahead` (entries that take
    their row's last token), `asked` (alternatives that each sample reports, -1 none) [S]. int32: query_starts [R + 1],
    contexts [R]. `changes` is the input of `DeviceBatch.bring`: rows of the table that grew (see batch_index.write_spans), and
    parameters of rows that joined. `width`: blocks of the longest context. `prompts`: what requests want of prompts. `drafted`:
    the step with true starts, and its drafts; None for a step of a draft model. `tiles`: the arrays of ThinTiles, where some
    tokens have an adapter.
    """

    step: int
    begins: np.ndarray
    places: np.ndarray
    query_starts: np.ndarray
    contexts: np.ndarray
    token_ids: np.ndarray
    ahead: np.ndarray
    samples: HostSamples
    changes: dict[str, np.ndarray]
    width: int
    wants: Wants
    asked: np.ndarray
    drafted: Drafted | None = None
    prompts: PromptInputs | None = None
    tiles: tuple[np.ndarray, np.ndarray] | None = None

    @property
    def computed(self) -> Drafted:
        """`drafted`, of a step that is not a draft model's."""
        assert self.drafted is not None
        return self.drafted

    @property
    def is_decode(self) -> bool:
        """Whether a sample follows every token."""
        return len(self.token_ids) == len(self.samples.at)

    @property
    def has_drafts(self) -> bool:
        """Whether some samples follow drafts, or are taken by no row."""
        return self.drafted is None or len(self.drafted.tokens) > 0

    @property
    def reported(self) -> dict[str, np.ndarray]:
        """The samples that report log-probabilities (int64 [A], among the samples), to be sent; {} for none."""
        return {"reported": np.flatnonzero(self.asked >= 0)} if self.wants.reported else {}

    @property
    def adapted(self) -> dict[str, np.ndarray]:
        """The tiles, to be sent; {} for none."""
        return {} if self.tiles is None else {"tile_tokens": self.tiles[0], "tiles": self.tiles[1].reshape(-1)}


class Samples(NamedTuple):
    """A step's samples on the device, int64: their batch `rows` and `positions` [S], those that report [A], if any, `takers` as in
    HostSamples, and the drafts that they follow."""

    rows: torch.Tensor
    positions: torch.Tensor
    reported: torch.Tensor | None
    takers: torch.Tensor
    drafts: BehindDrafts = BehindDrafts()


class DeviceBatch(BatchRows):
    """Rows of at most `config.max_num_seqs` requests, and one null row. One thread uses it."""

    _sampling: SamplingUpdates
    _drafts: LaterDrafts | None

    def __init__(
        self,
        config: SchedulerConfig,
        vocab_size: int,
        device: Device,
        operations: BatchOperations,
        vocabulary: Vocabulary | None = None,
        drafts_of: Callable[..., DraftBatch] | None = None,
        regions: Regions | None = None,
    ) -> None:
        """`vocabulary`: what constraints are matched with; none arrive without it. `drafts_of(batch, table, config)`: a model's
        drafts, if a model drafts. `regions`: where adapters are, if there are some."""
        speculation = config.speculation
        self.masks = RowMasks(config.max_num_seqs, vocabulary, speculation.num_speculative_tokens if speculation else 0)
        super().__init__(config, SamplingUpdates(config, vocab_size, self.masks))
        self._regions = regions
        self._tiles: tuple[bytes, tuple[np.ndarray, np.ndarray] | None] = b"", None
        self._device = device.torch_device
        self._grown: dict[str, np.ndarray] = {}
        self.parameters = RowParameters(config.max_num_seqs + 1, vocab_size, device.torch_device)
        self.null_row, self._operations = config.max_num_seqs, operations
        width = blocks_for(config.max_model_len, config.block_size) * config.group_count
        here = device.torch_device
        self.table = torch.zeros((config.max_num_seqs + 1, width), dtype=torch.int32, device=here)
        self.table[self.null_row] = config.page_count
        self.last = torch.zeros(config.max_num_seqs + 1, dtype=torch.int64, device=here)
        self.unread, self._model_drafts = Unread(), drafts_of and drafts_of(self, self._table, config)
        drafts = draft_rows(config, self.masks, self._model_drafts)
        self._drafts = None if drafts is None else LaterDrafts(drafts, self.unread, self._sampling, self._last)

    def host_step(self, state: State) -> HostStep:
        """The newest step in flight of `state`. Brings the rows in line with the state first. Waits for the steps before where
        they decide what this one computes: see LaterDrafts."""
        self.unread.look()
        self._update(state)
        scheduled = state.in_flight[-1]
        rows = self._rows_of(state, scheduled)
        places, drafted = self._places[rows], Drafted(scheduled, NO_DRAFTS)
        if self._drafts is not None:
            drafted = self._drafted = self._drafts.drafted(scheduled, places)
            scheduled = drafted.scheduled
        ends = scheduled.starts + scheduled.counts
        starts = np.zeros(len(places) + 1, dtype=np.int64)
        np.cumsum(scheduled.counts, out=starts[1:])
        samples, tiles = self._samples_of(scheduled, places, starts), self._tiles_of(state, scheduled)
        return HostStep(
            step=scheduled.step,
            begins=scheduled.starts,
            places=places,
            query_starts=starts.astype(np.int32),
            contexts=ends.astype(np.int32),
            token_ids=self._token_ids(state, scheduled, rows, places, positions_of(scheduled), starts),
            ahead=self._ahead(scheduled.starts >= state.rows.known[rows], places),
            samples=samples,
            changes=self.take_changes(),
            width=blocks_for(int(ends.max()), self._config.block_size),
            wants=self.wants(samples.rows, samples.positions)._replace(adapted=tiles is not None),
            asked=self._sampling.logprobs(samples.rows),
            drafted=drafted,
            prompts=prompt_inputs(self._prompts, scheduled, places, starts) if self._prompts else None,
            tiles=tiles,
        )

    @property
    def has_drafts(self) -> bool:
        return self._config.speculation is not None

    @property
    def made(self) -> torch.Tensor | None:
        """The newest drafts that the device keeps; None where it keeps none."""
        return None if self._model_drafts is None else self._model_drafts.made

    def wants(self, rows: np.ndarray, positions: np.ndarray) -> Wants:
        """As SamplingUpdates.wants."""
        return self._sampling.wants(rows, positions)

    def take_changes(self) -> dict[str, np.ndarray]:
        """What the device must be sent before it computes anything with the rows as they are; {} after that."""
        return self._take_grown() | self._sampling.take()

    def drop_steps(self) -> None:
        """As BatchRows.drop_steps, but all rows are taken anew: a step that lacked memory may not have brought the device its
        changes, which are of rows outside the step, too."""
        super().drop_steps()
        self._leave_all()

    def _ahead(self, runs_ahead: np.ndarray, places: np.ndarray) -> np.ndarray:
        """The entries whose first token is on the device alone (int64); `runs_ahead` bool [R]: those that the state does not
        know."""
        return np.flatnonzero(runs_ahead if self._drafts is None else runs_ahead & ~self._drafts.is_known[places])

    def _samples_of(self, scheduled: StepInFlight, places: np.ndarray, starts: np.ndarray) -> HostSamples:
        points = sample_points(scheduled)
        entries, ends = points.entries, scheduled.starts + scheduled.counts
        rows, drafts = places[entries], np.zeros_like(places) if scheduled.drafts is None else scheduled.drafts
        return HostSamples(
            ids=scheduled.ids[entries],
            rows=rows,
            positions=ends[entries] - points.back,
            at=starts[1:][entries] - 1 - points.back,
            depths=drafts[entries] - points.back,
            takers=np.where(drafts[entries] > 0, self.null_row, rows),
        )

    def bounds(self, step: HostStep) -> np.ndarray:
        """How many drafts of each request that samples may be kept (int64 [n]), once the step's masks are made; any without
        drafts."""
        if self._drafts is None or not len(step.computed.tokens):
            return NO_DRAFTS
        return self._drafts.bounds(step.computed.scheduled, step.places)

    def launched(self, step: HostStep, samples: StepSamples) -> None:
        """The step runs, and samples something."""
        if self._drafts is not None:
            self._drafts.launched(step.computed, step.places, samples)

    def _tiles_of(self, state: State, scheduled: StepInFlight) -> tuple[np.ndarray, np.ndarray] | None:
        """The tiles of the step's adapters. A request keeps its adapter, and the region while it runs, so steps with the same
        entries have the same tiles."""
        if self._regions is None:
            return None
        key = scheduled.entries[[0, 1, 3]].tobytes()
        if key != self._tiles[0]:
            found = [(self._regions[each.slot].index, each.tokens) for each in adapter_rows(state, scheduled)]
            self._tiles = key, make_tiles(found) if found else None
        return self._tiles[1]

    def _append(self, held: np.ndarray, more: np.ndarray, pages: np.ndarray) -> None:
        """Records the growth: the tables are on the device. What drafts with a model reads the host's too."""
        if self._model_drafts is not None:
            super()._append(held, more, pages)
        grown = np.flatnonzero(more)
        starts = np.zeros(len(grown) + 1, dtype=np.int64)
        np.cumsum(more[grown], out=starts[1:])
        self._grown = {
            "rows": self._places[grown], "columns": held[grown], "starts": starts, "values": pages.astype(np.int32)
        }  # fmt: skip

    def _take_grown(self) -> dict[str, np.ndarray]:
        """The growth recorded since the last call; {} for none."""
        grown, self._grown = self._grown, {}
        return grown

    def state_rows(self, state: State, scheduled: StepInFlight) -> np.ndarray | slice:
        """The rows of the state that the entries of its newest step belong to, after `host_step`."""
        return self._rows_of(state, scheduled)

    def bring(self, sent: dict[str, torch.Tensor]) -> None:
        """Apply a step's changes, which were sent, to the tables."""
        if "rows" in sent:
            self._operations.write_spans(self.table, sent["rows"], sent["columns"], sent["starts"], sent["values"])
        self.parameters.bring(sent)

    def forward(self, step: HostStep, staging: Staging) -> tuple[ForwardBatch, Samples]:
        """The step's tensors and its samples; both remain valid on the device until the staging is released."""
        arrays = {
            "begins": step.begins, "places": step.places, "query_starts": step.query_starts, "token_ids": step.token_ids,
            "ahead_rows": step.places[step.ahead], "ahead_at": step.query_starts[:-1][step.ahead].astype(np.int64),
            "sample_at": step.samples.at, "sampled": step.samples.rows, "sample_positions": step.samples.positions,
        }  # fmt: skip
        if step.has_drafts:
            arrays |= {"depths": step.samples.depths, "takers": step.samples.takers}
        sent = staging.send(arrays | step.changes | step.reported | step.adapted)
        self.bring(sent)
        if len(step.ahead):
            self._operations.place_tokens(self.last, sent["ahead_rows"], sent["ahead_at"], sent["token_ids"])
        token_ids = sent["token_ids"] if self.made is None else with_made(sent["token_ids"], self.made)
        positions, contexts, places = self._index(step, sent)
        batch = ForwardBatch(
            token_ids, positions, places[0].slots, sent["query_starts"], contexts, places[0].block_table,
            sent["sample_at"], host=HostBatch(step.query_starts, step.contexts), groups=tuple(places[1:]),
            tiles=ThinTiles(sent["tile_tokens"], sent["tiles"].view(-1, 3)) if step.tiles is not None else None,
        )  # fmt: skip
        samples = Samples(sent["sampled"], sent["sample_positions"], sent.get("reported"), sent.get("takers", sent["sampled"]))
        if step.has_drafts:
            fed = batch.token_ids.index_select(0, batch.sample_at)
            samples = samples._replace(drafts=BehindDrafts(fed, sent["depths"]))
        return batch, samples

    def _index(
        self, step: HostStep, sent: dict[str, torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor, list[GroupPlaces]]:
        """Positions [T], context lengths [R], and for each group slots and tables."""
        total, size, groups = len(step.token_ids), self._config.block_size, self._config.group_count
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
        """Store samples as the last tokens of batch rows `rows` (int64 [S] each, on the device), and count them for adjusted
        rows."""
        self.last.index_copy_(0, rows, tokens)
        if wants.adjusted:
            self.parameters.count(rows, tokens)


def decode_slots(
    table: torch.Tensor, rows: torch.Tensor, positions: torch.Tensor, block_size: int, group: int, groups: int
) -> torch.Tensor:
    """The slots (int64 [N]) of tokens at `positions` of batch rows `rows` (int64 [N] each) in one group of layers."""
    block = torch.div(positions, block_size, rounding_mode="floor")
    page = table.view(-1).index_select(0, rows * table.shape[1] + block * groups + group)
    return page.long() * block_size + (positions - block * block_size)
