"""Sampling parameters of the persistent batch, on the device: what each row is sampled by, and the tokens it has seen.

Owns the tables' memory. A step sends what joined (`row_notes.py`), and which rows it samples; the rest is here, at addresses
that graphs know. One table may grow: graphs that read it are those of another `version` then.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from vnext.runtime.row_notes import FLOATS, LONGS, ROOM
from vnext.runtime.sampling_inputs import IN_PROMPT, RowTables, SamplingInputs

NEUTRAL = {"top_p": 1.0, "repetition_penalty": 1.0}
"""Of a row that nobody has: it is sampled greedily."""
ENTRY_BYTES = 4
RATES_AT, MARKS_AT = FLOATS.index("repetition_penalty"), LONGS.index("until")


def parameter_bytes(row_count: int, vocab_size: int) -> int:
    """What the tables of that many rows take, but for a few kilobytes."""
    return (row_count + 1) * vocab_size * ENTRY_BYTES


class RowParameters:
    """Tables of `row_count` rows. One thread; all of it is work of the device and nothing waits."""

    def __init__(self, row_count: int, vocab_size: int, device: torch.device) -> None:
        here = {"device": device}
        self._floats = torch.zeros((len(FLOATS), row_count), dtype=torch.float32, **here)
        for name, value in NEUTRAL.items():
            self._floats[FLOATS.index(name)] = value
        self._longs = torch.zeros((len(LONGS), row_count), dtype=torch.int64, **here)
        self._history = torch.zeros((row_count, vocab_size), dtype=torch.int32, **here)
        self._bias_tokens = torch.zeros((row_count, ROOM["bias"]), dtype=torch.int64, **here)
        self._bias_values = torch.zeros((row_count, ROOM["bias"]), dtype=torch.float32, **here)
        self._stop_tokens = torch.zeros((row_count, ROOM["stop"]), dtype=torch.int64, **here)
        self._one = torch.ones(1, dtype=torch.int32, **here)
        self.version = 0

    @property
    def tables(self) -> RowTables:
        """What `adjust_rows` reads."""
        rates, marks = self._floats[RATES_AT:], self._longs[MARKS_AT:]
        return RowTables(rates, marks, self._history, self._bias_tokens, self._bias_values, self._stop_tokens)

    def bring(self, sent: Mapping[str, torch.Tensor]) -> None:
        """Bring the tables up to date with RowNotes.take, which was sent."""
        if "joined" in sent:
            for table, values in ((self._floats, sent["floats"]), (self._longs, sent["longs"])):
                table.index_copy_(1, sent["joined"], values.view(table.shape[0], -1))
        if "cleared" in sent:
            self._history.index_fill_(0, sent["cleared"], 0)
            self._history.view(-1).index_fill_(0, sent["prompt_at"], IN_PROMPT)
            self._add(sent["output_at"])
        if "bias_rows" in sent:
            self._bias_tokens = self._written(self._bias_tokens, sent["bias_rows"], sent["bias_tokens"])
            self._bias_values = self._written(self._bias_values, sent["bias_rows"], sent["bias_values"])
        if "stop_rows" in sent:
            self._stop_tokens = self._written(self._stop_tokens, sent["stop_rows"], sent["stop_tokens"])

    def inputs(self, places: torch.Tensor, positions: torch.Tensor) -> SamplingInputs:
        """By what rows `places` are sampled at `positions` (int64 [S] each)."""
        floats, longs = self._floats.index_select(1, places).unbind(0), self._longs.index_select(1, places).unbind(0)
        return SamplingInputs(
            temperature=floats[0], top_k=longs[0], top_p=floats[1], min_p=floats[2], seed=longs[1], position=positions
        )

    def count(self, places: torch.Tensor, tokens: torch.Tensor) -> None:
        """Rows `places` sampled `tokens` (int64 [S] each)."""
        self._add(places * self._history.shape[1] + tokens)

    def _add(self, entries: torch.Tensor) -> None:
        self._history.view(-1).index_add_(0, entries, self._one.expand(entries.shape[0]))

    def _written(self, table: torch.Tensor, rows: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """The table, or a wider one whose rows repeat their first entry, with the values [N * width] of some rows."""
        values = values.view(rows.shape[0], -1)
        if more := values.shape[1] - table.shape[1]:
            table = torch.cat((table, table[:, :1].expand(-1, more)), dim=1)
            self.version += 1
        return table.index_copy_(0, rows, values)
