"""Words of a batch on a device: at a step whose digest is due, the step's inputs go to the host beside its tokens.

Owns the choice of what is fetched. The tensors are those that the step reads, taken right before it runs and hashed once they
are on the host (batch/words.py); nothing waits. For penalised requests the device weighs its table of counts, so that one
number per row goes to the host and not a vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from vnext.kernels.thin_tiles import NAME_BYTES, names_of, tokens_by_region
from vnext.models.layers.batch import AdapterRows, ForwardBatch, GroupPlaces
from vnext.runtime.batch.fed import weights_of
from vnext.runtime.batch.step_inputs import StepInputs
from vnext.runtime.batch.tensors import arrays_of_step
from vnext.runtime.batch.words import fed_words
from vnext.runtime.gpu.adapter_regions import AdapterRegions
from vnext.runtime.gpu.device import Device, Mark
from vnext.runtime.gpu.device_batch import Samples
from vnext.runtime.gpu.row_parameters import RATES_AT, RowParameters
from vnext.runtime.gpu.sampling_updates import FLOATS, LONGS
from vnext.sampling.inputs import Allowed, Banned, Counted, LogitBias, SamplingInputs
from vnext.state.config import SchedulerConfig
from vnext.state.params import CHOOSING, DEFAULTS, PENALTIES

ROWS_AT_ONCE = 8
"""Rows whose counts are weighed at once: with a large vocabulary, all rows together would take gigabytes."""
NEUTRAL = [DEFAULTS[name] for name in PENALTIES]


class FedOnDevice(NamedTuple):
    """A step's inputs on their way to the host. `asked` int64 [S]: alternatives, -1 none. `adapters`: the tiles and the names in
    the regions, where some tokens have an adapter. `allowed`: the host's masks."""

    fetched: list[torch.Tensor]
    mark: Mark
    groups: int
    asked: np.ndarray
    adapters: Sequence[torch.Tensor] = ()
    allowed: Allowed | None = None

    def words(self, config: SchedulerConfig) -> tuple[int, ...]:
        """As `fed_words`, but waits for the tensors."""
        self.mark.wait()
        adapters, digests = adapters_of(*self.adapters) if self.adapters else ((), {})
        token_ids, positions, query_starts, contexts, sample_at, *others = self.fetched
        of_groups, parameters = others[: 2 * self.groups], others[2 * self.groups :]
        places = [GroupPlaces(slots=slots, block_table=table) for slots, table in zip(of_groups[::2], of_groups[1::2])]
        forward = ForwardBatch(
            token_ids, positions, places[0].slots, query_starts, contexts, places[0].block_table, sample_at,
            groups=tuple(places[1:]), adapters=adapters,
        )  # fmt: skip
        sampling = sampling_of(*parameters)._replace(allowed=self.allowed) if parameters else None
        return fed_words(arrays_of_step(StepInputs(forward, sampling, self.asked)), config, digests)


class FedWatch:
    """Fetches the model's inputs. One thread."""

    def __init__(self, device: Device, parameters: RowParameters, regions: AdapterRegions | None = None) -> None:
        self._device, self._parameters, self._regions = device, parameters, regions
        vocabulary = parameters.tables.history.shape[1]
        self._weights = device.upload(torch.from_numpy(weights_of(np.arange(vocabulary)).astype(np.int64)))

    def take(self, forward: ForwardBatch, samples: Samples, asked: np.ndarray, adjusted: bool) -> FedOnDevice:
        """Take the inputs of a step about to run. `adjusted`: whether some rows are penalised, biased or below their minimum
        length."""
        places = [(forward.slots, forward.block_table), *forward.groups]
        tensors = [forward.token_ids, forward.positions, forward.query_starts, forward.context_lengths, forward.sample_at]
        tensors += [tensor for each in places for tensor in each]
        if len(asked):
            tensors += self._of_samples(samples, adjusted)
        of_adapters: list[torch.Tensor] = []
        if self._regions is not None and forward.tiles is not None:
            of_adapters = [*forward.tiles, self._regions.memory[:, :NAME_BYTES]]
        fetched, mark = self._device.fetch([*tensors, *of_adapters])
        return FedOnDevice(fetched[: len(tensors)], mark, len(places), asked, fetched[len(tensors) :])

    def _of_samples(self, samples: Samples, adjusted: bool) -> list[torch.Tensor]:
        rows, tables = samples.rows, self._parameters.tables
        floats, longs = (table.index_select(1, rows) for table in self._parameters.columns)
        counted = self._weighed(tables.history, rows) if adjusted else torch.zeros_like(rows)
        if adjusted and samples.drafts.fed is not None:
            counted += (samples.drafts.before() * self._weights.index_select(0, samples.drafts.fed)).sum(dim=1)
        lists = (tables.bias_tokens, tables.bias_values, tables.stop_tokens)
        return [floats, longs, samples.positions, counted, *(each.index_select(0, rows) for each in lists)]

    def _weighed(self, history: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """int64 [S]: each row's counts, multiplied by the tokens' weights and summed modulo 2^64."""
        parts = [(history.index_select(0, some) * self._weights).sum(dim=1) for some in rows.split(ROWS_AT_ONCE)]
        return torch.cat(parts)


def adapters_of(
    tokens: torch.Tensor, tiles: torch.Tensor, names: torch.Tensor
) -> tuple[tuple[AdapterRows, ...], dict[int, str]]:
    """The tokens of each adapter, by its region, and the digests of the adapters that the regions held. All on the host."""
    found = tokens_by_region(tokens.numpy(), tiles.numpy())
    rows = tuple(AdapterRows(region, its) for region, its in found.items())
    return rows, dict(enumerate(names_of(names)))


def sampling_of(
    floats: torch.Tensor, longs: torch.Tensor, positions: torch.Tensor, counted: torch.Tensor, bias_tokens: torch.Tensor,
    bias_values: torch.Tensor, stop_tokens: torch.Tensor,
) -> SamplingInputs:  # fmt: skip
    """The parameters of a step's S samples in a device's tables (now on the host), in the form of the plain batch. A list shorter
    than its table's width repeats its first entry."""
    columns = dict(zip(FLOATS, floats)) | dict(zip(LONGS, longs))
    rates = floats[RATES_AT:]
    penalised = (rates != torch.tensor(NEUTRAL)[:, None]).any(dim=0).nonzero()[:, 0]
    repetition, presence, frequency = rates[:, penalised]
    biased = [(at, place) for at, count in enumerate(columns["bias_count"].tolist()) for place in range(count)]
    at, place = torch.tensor(biased, dtype=torch.int64).view(-1, 2).T
    early = (positions < columns["until"]).nonzero()[:, 0].tolist()
    banned = [(at, token) for at in early for token in dict.fromkeys(stop_tokens[at].tolist())]
    return SamplingInputs(
        **{name: columns[name] for name in (*CHOOSING, "seed")},
        position=positions,
        penalties=Counted(penalised, repetition, presence, frequency, counted[penalised]) if len(penalised) else None,
        bias=LogitBias(at, bias_tokens[at, place], bias_values[at, place]) if biased else None,
        banned=Banned(*torch.tensor(banned, dtype=torch.int64).view(-1, 2).T) if banned else None,
    )
