"""Sampling updates: what the host sends a device when requests take batch rows, once, as they join.

Owns, on the host, the row parameters that decide a step's variant, and the updates not sent yet. For a penalised request the
tokens are sent, not a vocabulary; the device counts tokens sampled later. The device's tables are in `row_parameters.py`.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple, TypeVar

import numpy as np

from vnext.runtime.batch.fed import stop_ids
from vnext.runtime.batch.masks import RowMasks
from vnext.state.config import SchedulerConfig
from vnext.state.params import CHOOSING, PENALTIES, ROW_DTYPES, is_penalised
from vnext.state.preempt import row_tokens
from vnext.state.state import State
from vnext.state.store import fields

FLOATS = (*(name for name in CHOOSING if ROW_DTYPES[name] == "float32"), *PENALTIES)
"""Rows of the device's float32 table, as Sampling names them; the last are RowTables.rates."""
WHOLE = tuple(name for name in CHOOSING if ROW_DTYPES[name] == "int64")
LONGS = (*WHOLE, "seed", "until", "bias_count")
"""Rows of the device's int64 table; the last two are RowTables.marks."""
ROOM = {"bias": 16, "stop": 4}
"""Initial number of entries for a row's bias and stop tokens."""


class Wants(NamedTuple):
    """What the rows of a step need beyond the model and a token drawn from its logits: adjusted logits, log-probabilities, masks,
    which the host makes once it knows the tokens before, or adapters."""

    adjusted: bool
    reported: bool
    masked: bool = False
    adapted: bool = False


PLAIN = Wants(False, False)

Entry = TypeVar("Entry")


class SamplingUpdate(NamedTuple):
    """A request that took a row. `history`: its prompt and its answer; None where it is not penalised."""

    floats: tuple[float, ...]
    longs: tuple[int, ...]
    history: tuple[np.ndarray, np.ndarray] | None
    bias: tuple[tuple[int, float], ...]
    stops: tuple[int, ...]


class SamplingUpdates:
    """One entry per batch row. One thread."""

    def __init__(self, config: SchedulerConfig, vocab_size: int, masks: RowMasks) -> None:
        self._config, self._vocab_size, self._masks = config, vocab_size, masks
        self._changes = np.zeros(config.max_num_seqs, dtype=bool)  # penalties or bias
        self._penalised = np.zeros(config.max_num_seqs, dtype=bool)
        self._kept: list[tuple[int, int]] = []  # (place, token)
        self._until = np.zeros(config.max_num_seqs, dtype=np.int64)
        self._logprobs = np.full(config.max_num_seqs, -1, dtype=np.int64)
        self.spoilt: set[int] = set()  # rows that must join anew: their constraints lacked memory behind a step
        self._room = dict(ROOM)
        self._pending_updates: dict[int, SamplingUpdate] = {}

    def join(self, place: int, state: State, row: int) -> None:
        """A request takes a batch row."""
        request = state.requests[int(state.rows.id[row])]
        sampling, stops = request.sampling, stop_ids(self._config, request.sampling)
        penalised = is_penalised(sampling)
        if sampling.constraint is not None:
            self._masks.join(place, sampling.constraint, row_tokens(state, row)[request.prompt_length :].tolist())
        until = int(state.rows.cells[fields.MIN_KNOWN, row]) if sampling.min_tokens and stops else 0
        seed = int(np.uint64(sampling.seed).astype(np.int64))
        self._changes[place], self._penalised[place] = penalised or bool(sampling.logit_bias), penalised
        self._until[place], self._logprobs[place] = until, sampling.logprobs
        self._pending_updates[place] = SamplingUpdate(
            floats=tuple(getattr(sampling, name) for name in FLOATS),
            longs=(*(getattr(sampling, name) for name in WHOLE), seed, until, len(sampling.logit_bias)),
            history=request.parted(row_tokens(state, row).astype(np.int64)) if penalised else None,
            bias=sampling.logit_bias,
            stops=stops if until else (),
        )

    def leave(self, place: int) -> None:
        self._pending_updates.pop(place, None)
        self._kept = [each for each in self._kept if each[0] != place]
        self._masks.leave(place)

    def drop(self) -> None:
        """Steps are over without samples."""
        self.spoilt = self._masks.drop()

    def count(self, places: np.ndarray, tokens: np.ndarray) -> None:
        """Rows (int64 [n]) have kept these drafts or samples behind drafts, which the device does not count by itself."""
        counts = self._penalised[places]
        self._kept += zip(places[counts].tolist(), tokens[counts].tolist())

    def wants(self, places: np.ndarray, positions: np.ndarray) -> Wants:
        """The needs of rows `places`, whose next tokens are sampled at `positions` (int64 [S] each)."""
        adjusted = bool(self._changes[places].any()) or bool((positions < self._until[places]).any())
        return Wants(adjusted, int(self._logprobs[places].max(initial=-1)) >= 0, bool(self._masks.of(places)))

    def logprobs(self, places: np.ndarray) -> np.ndarray:
        """Alternatives that each row asked for, -1 none (int64 [S])."""
        found: np.ndarray = self._logprobs[places]
        return found

    def take(self) -> dict[str, np.ndarray]:
        """Updates recorded since the last call, as RowParameters.bring takes them; {} for none."""
        kept = self._take_kept()
        if not self._pending_updates:
            return kept
        updates, self._pending_updates = self._pending_updates, {}
        reported: dict[str, np.ndarray] = {
            "joined": np.array([*updates], dtype=np.int64),
            "floats": np.array([note.floats for note in updates.values()], dtype=np.float32).T.reshape(-1),
            "longs": np.array([note.longs for note in updates.values()], dtype=np.int64).T.reshape(-1),
        }
        bias = {place: note.bias for place, note in updates.items() if note.bias}
        stops = {place: note.stops for place, note in updates.items() if note.stops}
        return kept | reported | self._history(updates) | self._biases(bias) | self._stops(stops)

    def _take_kept(self) -> dict[str, np.ndarray]:
        """Entries of the [rows, V] table that grow by one, as often as they are named."""
        kept, self._kept = self._kept, []
        if not kept:
            return {}
        at: np.ndarray = np.array(kept, dtype=np.int64) @ (self._vocab_size, 1)
        return {"kept_at": at}

    def _history(self, updates: dict[int, SamplingUpdate]) -> dict[str, np.ndarray]:
        """Entries of the [rows, V] table as one sequence."""
        found = {place: note.history for place, note in updates.items() if note.history is not None}
        if not found:
            return {}
        prompts = [place * self._vocab_size + prompt.astype(np.int64) for place, (prompt, _) in found.items()]
        outputs = [place * self._vocab_size + answer for place, (_, answer) in found.items()]
        cleared = np.array([*found], dtype=np.int64)
        return {"cleared": cleared, "prompt_at": np.concatenate(prompts), "output_at": np.concatenate(outputs)}

    def _biases(self, found: dict[int, tuple[tuple[int, float], ...]]) -> dict[str, np.ndarray]:
        if not found:
            return {}
        room = self._make_room("bias", found.values())
        entries = [entry for each in found.values() for entry in repeated(each, room)]
        return {
            "bias_rows": np.array([*found], dtype=np.int64),
            "bias_tokens": np.array([token for token, _ in entries], dtype=np.int64),
            "bias_values": np.array([value for _, value in entries], dtype=np.float32),
        }

    def _stops(self, found: dict[int, tuple[int, ...]]) -> dict[str, np.ndarray]:
        if not found:
            return {}
        room = self._make_room("stop", found.values())
        tokens = [token for each in found.values() for token in repeated(each, room)]
        return {"stop_rows": np.array([*found], dtype=np.int64), "stop_tokens": np.array(tokens, dtype=np.int64)}

    def _make_room(self, kind: str, found: Collection[tuple[object, ...]]) -> int:
        """Entries per row, doubled until the longest fits."""
        while self._room[kind] < max(map(len, found)):
            self._room[kind] *= 2
        return self._room[kind]


def repeated(entries: tuple[Entry, ...], count: int) -> tuple[Entry, ...]:
    """`count` entries: the first one fills up the rest."""
    return entries + entries[:1] * (count - len(entries))
