"""Sampling parameters of the persistent batch on the device: each row's parameters, and the tokens it has seen.

Owns the tables' memory. A step sends the rows that joined (`sampling_updates.py`) and the rows that it samples; everything else
stays here, at addresses that graphs hold. A table may grow: `version` then changes, and graphs that read the old table are
captured again.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from vnext.runtime.gpu.sampling_updates import FLOATS, LONGS, ROOM
from vnext.sampling.inputs import RowTables, SamplingInputs
from vnext.state.params import DEFAULTS, IN_PROMPT, PENALTIES

ENTRY_BYTES = 4
RATES_AT, MARKS_AT = FLOATS.index(PENALTIES[0]), LONGS.index("until")


def parameter_bytes(row_count: int, vocab_size: int) -> int:
    """Bytes of the tables for `row_count` rows, except a few kilobytes."""
    return (row_count + 1) * vocab_size * ENTRY_BYTES


class RowParameters:
    """Tables of `row_count` rows. One thread; everything runs as work of the device and nothing waits."""

    def __init__(self, row_count: int, vocab_size: int, device: torch.device) -> None:
        self._floats = torch.zeros((len(FLOATS), row_count), dtype=torch.float32, device=device)
        for name in FLOATS[1:]:  # a row without a request is sampled greedily
            self._floats[FLOATS.index(name)] = DEFAULTS[name]
        self._longs = torch.zeros((len(LONGS), row_count), dtype=torch.int64, device=device)
        self._history = torch.zeros((row_count, vocab_size), dtype=torch.int32, device=device)
        self._bias_tokens = torch.zeros((row_count, ROOM["bias"]), dtype=torch.int64, device=device)
        self._bias_values = torch.zeros((row_count, ROOM["bias"]), dtype=torch.float32, device=device)
        self._stop_tokens = torch.zeros((row_count, ROOM["stop"]), dtype=torch.int64, device=device)
        self._one = torch.ones(1, dtype=torch.int32, device=device)
        self.version = 0

    @property
    def columns(self) -> tuple[torch.Tensor, torch.Tensor]:
        """float32 [FLOATS, B] and int64 [LONGS, B]: each row's sampling parameters."""
        return self._floats, self._longs

    @property
    def tables(self) -> RowTables:
        rates, marks = self._floats[RATES_AT:], self._longs[MARKS_AT:]
        return RowTables(rates, marks, self._history, self._bias_tokens, self._bias_values, self._stop_tokens)

    def bring(self, sent: Mapping[str, torch.Tensor]) -> None:
        """Apply the output of SamplingUpdates.take, which was sent, to the tables."""
        if "joined" in sent:
            for table, values in ((self._floats, sent["floats"]), (self._longs, sent["longs"])):
                table.index_copy_(1, sent["joined"], values.view(table.shape[0], -1))
        if "cleared" in sent:
            self._history.index_fill_(0, sent["cleared"], 0)
            self._history.view(-1).index_fill_(0, sent["prompt_at"], IN_PROMPT)
            self._add(sent["output_at"])
        if "kept_at" in sent:
            self._add(sent["kept_at"])
        if "bias_rows" in sent:
            self._bias_tokens = self._written(self._bias_tokens, sent["bias_rows"], sent["bias_tokens"])
            self._bias_values = self._written(self._bias_values, sent["bias_rows"], sent["bias_values"])
        if "stop_rows" in sent:
            self._stop_tokens = self._written(self._stop_tokens, sent["stop_rows"], sent["stop_tokens"])

    def inputs(self, places: torch.Tensor, positions: torch.Tensor) -> SamplingInputs:
        """Sampling inputs of rows `places` at `positions` (int64 [S] each)."""
        floats, longs = self._floats[:RATES_AT].index_select(1, places), self._longs[:MARKS_AT].index_select(1, places)
        return SamplingInputs(**dict(zip(FLOATS, floats)), **dict(zip(LONGS, longs)), position=positions)

    def count(self, places: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """Rows `places` have sampled `tokens` (int64 [S] each). Returns what `uncount` takes back."""
        entries = places * self._history.shape[1] + tokens
        self._add(entries)
        return entries

    def uncount(self, entries: torch.Tensor) -> None:
        """Take back what was counted."""
        self._history.view(-1).index_add_(0, entries, self._one.expand(entries.shape[0]), alpha=-1)

    def _add(self, entries: torch.Tensor) -> None:
        self._history.view(-1).index_add_(0, entries, self._one.expand(entries.shape[0]))

    def _written(self, table: torch.Tensor, rows: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """The table with the values [N * width] of some rows written; a wider table, if needed, repeats rows' first entries."""
        values = values.view(rows.shape[0], -1)
        if more := values.shape[1] - table.shape[1]:
            table = torch.cat((table, table[:, :1].expand(-1, more)), dim=1)
            self.version += 1
        return table.index_copy_(0, rows, values)
