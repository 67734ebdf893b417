"""What the host tells a device of the requests that take batch rows: by what they are sampled, once, when they join.

Owns, on the host, each row's parameters as far as a step's form depends on them, and what was not sent yet. Of a penalised
request the tokens are sent, not a vocabulary; tokens sampled later are counted on the device. Whose tables these are:
`row_parameters.py`.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from vnext.runtime.batch_sampling import is_penalised, stop_ids
from vnext.state import rows as columns
from vnext.state.config import SchedulerConfig
from vnext.state.planning import row_tokens
from vnext.state.state import State

FLOATS = ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
"""Rows of the device's table of float32, as Sampling names them; the last three are RowTables.rates."""
LONGS = ("top_k", "seed", "until", "bias_count")
"""Rows of its table of int64; the last two are RowTables.marks."""
ROOM = {"bias": 16, "stop": 4}
"""Entries of a row's bias and stop tokens at first."""


class Wants(NamedTuple):
    """What the rows of a step want beyond a token drawn from the model's logits: these changed, or log-probabilities."""

    adjusted: bool
    reported: bool


PLAIN = Wants(False, False)


class Note(NamedTuple):
    """A request that took a row. `history`: its tokens, `prompt_length` of them the prompt; None where it is not penalised."""

    floats: tuple[float, ...]
    longs: tuple[int, ...]
    history: np.ndarray | None
    prompt_length: int
    bias: tuple[tuple[int, float], ...]
    stops: tuple[int, ...]


class RowNotes:
    """One entry per batch row. One thread."""

    def __init__(self, config: SchedulerConfig, vocab_size: int) -> None:
        self._config, self._vocab_size = config, vocab_size
        self._changes = np.zeros(config.running_max, dtype=bool)  # penalties or bias
        self._until = np.zeros(config.running_max, dtype=np.int64)
        self._logprobs = np.full(config.running_max, -1, dtype=np.int64)
        self._room = dict(ROOM)
        self._noted: dict[int, Note] = {}

    def join(self, place: int, state: State, row: int) -> None:
        """A request takes a batch row."""
        request = state.requests[int(state.rows.id[row])]
        sampling, stops = request.sampling, stop_ids(self._config, request.sampling)
        penalised = is_penalised(sampling)
        until = int(state.rows.cells[columns.MIN_KNOWN, row]) if sampling.min_tokens and stops else 0
        seed = int(np.uint64(sampling.seed).astype(np.int64))
        self._changes[place] = penalised or bool(sampling.logit_bias)
        self._until[place], self._logprobs[place] = until, sampling.logprobs
        self._noted[place] = Note(
            floats=tuple(getattr(sampling, name) for name in FLOATS),
            longs=(sampling.top_k, seed, until, len(sampling.logit_bias)),
            history=row_tokens(state, row).astype(np.int64) if penalised else None,
            prompt_length=request.prompt_length,
            bias=sampling.logit_bias,
            stops=stops if until else (),
        )

    def leave(self, place: int) -> None:
        """A row is free."""
        self._noted.pop(place, None)

    def wants(self, places: np.ndarray, positions: np.ndarray) -> Wants:
        """Of rows `places` whose next tokens are sampled at `positions` (int64 [S] each)."""
        adjusted = bool(self._changes[places].any()) or bool((positions < self._until[places]).any())
        return Wants(adjusted, int(self._logprobs[places].max(initial=-1)) >= 0)

    def logprobs(self, places: np.ndarray) -> np.ndarray:
        """Alternatives that each row asked for, -1 none (int64 [S])."""
        return self._logprobs[places]

    def take(self) -> dict[str, np.ndarray]:
        """What was noted since the last time, as RowParameters.bring takes it; {} for nothing."""
        if not self._noted:
            return {}
        noted, self._noted = self._noted, {}
        told = {
            "joined": np.array([*noted], dtype=np.int64),
            "floats": np.array([note.floats for note in noted.values()], dtype=np.float32).T.reshape(-1),
            "longs": np.array([note.longs for note in noted.values()], dtype=np.int64).T.reshape(-1),
        }
        bias = {place: note.bias for place, note in noted.items() if note.bias}
        stops = {place: note.stops for place, note in noted.items() if note.stops}
        return told | self._history(noted) | self._biases(bias) | self._stops(stops)

    def _history(self, noted: dict[int, Note]) -> dict[str, np.ndarray]:
        """Entries of the table of [rows, V] as one run."""
        found = {place: note for place, note in noted.items() if note.history is not None}
        if not found:
            return {}
        prompts = [place * self._vocab_size + note.history[: note.prompt_length] for place, note in found.items()]
        outputs = [place * self._vocab_size + note.history[note.prompt_length :] for place, note in found.items()]
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

    def _make_room(self, kind: str, found) -> int:
        """Entries of each row, doubled until the longest fits."""
        while self._room[kind] < max(map(len, found)):
            self._room[kind] *= 2
        return self._room[kind]


def repeated(entries: tuple, count: int) -> tuple:
    """As many entries: the first fills up."""
    return entries + entries[:1] * (count - len(entries))
