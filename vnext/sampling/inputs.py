"""The inputs and outputs of sampling: tensors of one step, built by the persistent batch.

Owns the shapes and the check of the inputs. Knows no requests, only rows. Python bools accompany the tensors, so that
choosing a path reads nothing back from a device.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from vnext.kernels.arrays import Array, address, dense, dtype_name, is_dense, torch_dtype
from vnext.state.params import DEFAULTS, ROW_DTYPES

if TYPE_CHECKING:
    import torch



VOCABULARY_MAX = 2**22
"""The most tokens of which the weights of a row have a sum below 2**62, see `draw.scale`."""
REPORTED_TOGETHER = 32
"""The number of rows whose log-probabilities are computed at once. On a device each needs about forty bytes a token."""


class Penalties(NamedTuple):
    """The penalties of P of the S rows over a vocabulary of V; the values 1, 0, 0 change nothing.

    `rows` int64[P] without repeats; `repetition`, `presence`, `frequency` float32[P]; `prompt_mask` bool[P, V]: whether
    the token is in the prompt; `output_counts` int32[P, V]: how often the token was sampled so far. On the host the last two may be
    P dense arrays [V], which are not joined.
    """

    rows: Array
    repetition: Array
    presence: Array
    frequency: Array
    prompt_mask: Array
    output_counts: Array

    @property
    def rates(self) -> tuple[Array, ...]:
        """The rates in the order of vnext.state.params.PENALTIES."""
        return self.repetition, self.presence, self.frequency


class Counted(NamedTuple):
    """Penalties with one word for each row instead of counts (int64[P], batch/words.py): only hashed, never used to sample."""

    rows: Array
    repetition: Array
    presence: Array
    frequency: Array
    counted: Array

    @property
    def rates(self) -> tuple[Array, ...]:
        """The same as Penalties.rates."""
        return self.repetition, self.presence, self.frequency


class LogitBias(NamedTuple):
    """`values` float32[B] to add to the logits at (`rows`, `tokens`) int64[B]; each pair appears once."""

    rows: Array
    tokens: Array
    values: Array


class Banned(NamedTuple):
    """Pairs (`rows`, `tokens`) int64[B] that may not be sampled now: end tokens of a request below `min_tokens`."""

    rows: Array
    tokens: Array


def nothing_to_wait_for() -> None:
    """Of masks that are complete."""


class Allowed(NamedTuple):
    """Which tokens C of the S rows may go on with: row rows[i] those of masks[places[i]].

    `rows` int64[C] without repeats; `places` int64[C]; `masks` int32[B, V / 32, rounded up], dense, one bit a token, the lowest bit
    of the first word first. `wait` returns when the masks are complete; until then they may not be read. `firsts` int64[C], on the
    host: the first token of each row that is a time; where none is, the number of tokens, and one more where log-probabilities are
    those among what may come, as in rows with times; None where that is so nowhere.
    """

    rows: Array
    places: Array
    masks: Array
    wait: Callable[[], None] = nothing_to_wait_for
    firsts: np.ndarray | None = None

    def masks_of_rows(self) -> Array:
        """int32[C, V / 32, rounded up]."""
        self.wait()
        return self.masks[self.places]

    def timed(self) -> tuple[np.ndarray, ...]:
        """`firsts`, where there are some."""
        return () if self.firsts is None else (self.firsts,)

    def judged(self, size: int) -> list[int]:
        """The rows whose log-probabilities are those among what may come; `size`: the number of tokens."""
        return [] if self.firsts is None else self.rows[self.firsts != size].tolist()

    def addresses(self, count: int) -> np.ndarray:
        """Of the masks of `count` rows (int64), as the CPU's `mask_rows` takes them. Waits for nothing."""
        found = np.zeros(count, dtype=np.int64)
        found[np.asarray(self.rows)] = address(self.masks) + np.asarray(self.places) * self.masks.shape[1] * self.masks.itemsize
        return found


class SamplingInputs(NamedTuple):
    """The parameters of S rows: arrays of the host, or tensors on one device.

    Columns [S] have the dtypes of ROW_DTYPES; read them through `columns`. Those of vnext.state.params.Drawn have its
    meaning and defaults; None is the default in every row. `seed` has the bit pattern of the uint64 root key.
    `position` is the index of the token to be sampled in prompt + output, counted from 0. `logprobs`: the largest
    number of alternatives requested in this batch, -1 for none. `any_random`: a row has a temperature above 0.
    `any_filter`: such a row has a filter on. Both may be true unnecessarily (slower, same tokens), but never false if a
    row contradicts them.
    """

    temperature: Array
    top_k: Array
    top_p: Array
    min_p: Array
    seed: Array
    position: Array
    penalties: Penalties | Counted | None = None
    bias: LogitBias | None = None
    banned: Banned | None = None
    logprobs: int = -1
    any_random: bool = True
    any_filter: bool = True
    top_n_sigma: Array | None = None
    allowed: Allowed | None = None

    def columns(self) -> tuple[Array, ...]:
        """The rows' columns in the order of ROW_DTYPES, as kernels take them: contiguous, with defaults in place of None."""
        found, like = list[Array](), self.temperature
        for name, dtype in ROW_DTYPES.items():
            column: Array | None = getattr(self, name)
            if column is not None:
                found.append(column if is_dense(column) else dense(column))
            elif isinstance(like, np.ndarray):
                found.append(np.full(like.shape, DEFAULTS[name], dtype=dtype))
            else:
                found.append(like.new_full(like.shape, DEFAULTS[name], dtype=torch_dtype(dtype)))
        return tuple(found)


class RowTables(NamedTuple):
    """The tables that a device keeps for B batch rows and that `adjust_rows` reads. V is the vocabulary size.

    `rates` float32[3, B]: repetition, presence and frequency penalty; 1, 0, 0 change nothing, whatever `history` holds.
    `marks` int64[2, B]: the position in prompt + output from which `stop_tokens` may be sampled, 0 for always; and the
    number of valid entries of `bias_tokens`. `history` int32[B, V]: how often each token was sampled, plus IN_PROMPT if
    it is in the prompt. `bias_tokens` int64[B, X] and `bias_values` float32[B, X] (added to logits), `stop_tokens`
    int64[B, Y]: a row with fewer entries repeats its first.
    """

    rates: torch.Tensor
    marks: torch.Tensor
    history: torch.Tensor
    bias_tokens: torch.Tensor
    bias_values: torch.Tensor
    stop_tokens: torch.Tensor


class BehindDrafts(NamedTuple):
    """Which of S samples follow drafts. `fed` int64[S]: the token that each sample follows. `depths` int64[S]: how many drafts of
    its request it follows; theirs are the `fed` tokens of this sample and of those just before it. Both None where there are
    no drafts."""

    fed: torch.Tensor | None = None
    depths: torch.Tensor | None = None

    def before(self) -> torch.Tensor:
        """bool[S, S]: whether column's `fed` is one of the drafts that row's sample follows. Waits for no device."""
        assert self.depths is not None
        places = self.depths.new_ones(len(self.depths)).cumsum(0) - 1
        back = places[:, None] - places
        return (back >= 0) & (back < self.depths[:, None])


NO_DRAFTS = BehindDrafts()


class Sampled(NamedTuple):
    """One token for each row. The other fields are None unless logprobs were requested; they describe the raw logits, or in rows
    that are judged (Allowed) the adjusted ones.

    `tokens` int64[S]; `logprob` float32[S] of that token; `rank` int64[S], the number of likelier tokens; `top_tokens`
    int64[S, K], likeliest first, lower id first among equals, with `top_logprobs` float32[S, K].
    """

    tokens: Array
    logprob: Array | None = None
    rank: Array | None = None
    top_tokens: Array | None = None
    top_logprobs: Array | None = None


def is_plain(inputs: SamplingInputs) -> bool:
    """Whether only tokens are requested, drawn from logits that at most a mask adjusts."""
    adjusted = (inputs.bias, inputs.banned, inputs.penalties)
    is_masked_alone = inputs.allowed is None or inputs.allowed.firsts is None
    return inputs.logprobs < 0 and is_masked_alone and all(each is None for each in adjusted)


def check_vocabulary(size: int) -> None:
    """Raise ValueError if the sum of the weights of `size` tokens might overflow."""
    if size > VOCABULARY_MAX:
        raise ValueError(f"a vocabulary of {size} is over {VOCABULARY_MAX}: weights would overflow")


def check_inputs(logits: torch.Tensor, inputs: SamplingInputs) -> None:
    """Raise ValueError if shapes, dtypes or devices break the contract. Reads no values, so it waits for no device."""
    if logits.dim() != 2 or dtype_name(logits.dtype) != "float32":
        raise ValueError(f"logits must be float32[S, V], got {logits.dtype}{list(logits.shape)}; convert them first")
    for name, dtype in ROW_DTYPES.items():
        column = getattr(inputs, name)
        if column is None:
            continue
        if dtype_name(column.dtype) != dtype or column.shape != logits.shape[:1] or column.device != logits.device:
            raise ValueError(
                f"{name} must be torch.{dtype}[{logits.shape[0]}] on {logits.device}, "
                f"got {column.dtype}{list(column.shape)} on {column.device}; give one value a row"
            )
    if isinstance(inputs.penalties, Counted):
        raise ValueError("penalties that are only counted are for hashes: give Penalties to what samples")
    if inputs.penalties is not None:
        check_penalties(logits, inputs.penalties)
    if inputs.allowed is not None and inputs.allowed.masks.shape[1] != (width := (logits.shape[1] + 31) // 32):
        raise ValueError(
            f"allowed.masks must be int32[B, {width}], got {inputs.allowed.masks.dtype}{list(inputs.allowed.masks.shape)}; "
            "give a bit for each token of the logits"
        )


def check_penalties(logits: torch.Tensor, penalties: Penalties) -> None:
    """Raise ValueError unless the tables of `penalties` span the vocabulary of `logits`."""
    expected = (penalties.rows.shape[0], logits.shape[1])
    for name in ("prompt_mask", "output_counts"):
        if (found := _shape(getattr(penalties, name))) != expected:
            raise ValueError(
                f"penalties.{name} must have shape {expected}, got {found}; give one row a penalised row, as wide as the logits"
            )


def _shape(table: Array | tuple[Array, ...]) -> tuple[int, ...]:
    """That of a table, or of the rows of one."""
    return (len(table), *table[0].shape) if isinstance(table, tuple) else tuple(table.shape)
