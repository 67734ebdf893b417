"""Calibration: how large the inputs of each weight's columns are over a text, by which errors of rounding count.

An error of a weight changes a product by the error times its input, so its square counts as often as the mean square of that input
is: AWQ and llama.cpp's imatrix have it so, too. The model computes windows of the text in its own dtype, and the products of its
layers are listened to.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer

from vnext.base.spelling import reason
from vnext.base.tokenizer_files import tokenizer_json
from vnext.kernels.arrays import torch_dtype
from vnext.kernels.table import Operations, operations, substituted
from vnext.models.config.model_config import ModelConfig, load_config
from vnext.models.errors import ModelError
from vnext.models.layers.batch import ForwardBatch, GroupPlaces, HostBatch
from vnext.models.layers.kv_cache import kv_groups, make_kv_cache
from vnext.models.layers.sharding import alone
from vnext.models.loading.kept import Kept
from vnext.models.loading.weights import choose_dtype, load_params
from vnext.models.registry import family

WINDOW, WINDOWS_MAX, BLOCK = 512, 64, 16
"""Tokens that are computed together, how many such windows of a text count at most, and the tokens of a block of the cache."""
Squares = dict[str, np.ndarray]
"""By a weight's name the mean square of each column's inputs, float32 [in]."""


def column_squares(folder: Path, text: Path) -> tuple[Squares, int]:
    """Those of the checkpoint in `folder` over a file's text, and how many tokens counted. Weights of experts have none. Raises
    ModelError."""
    config = load_config(folder)
    if config.recurrent or config.encoder or config.hosted:
        raise ModelError(f"{config.architecture} is not calibrated, only decoders whose layers all attend: leave --calibrate out")
    windows = list(_windows(folder, text, config))
    dtype, kept = torch_dtype(choose_dtype("auto", config)), Kept()
    params = load_params(folder, config, alone(), dtype, "cpu", kept=kept)
    if getattr(params, "stack", None) is not None:  # which is one call, inside which nobody listens
        params = params._replace(stack=None)
    listener, module = _Listener({id(weight): names for names, weight in kept.targets}), family(config.architecture)
    pages = -(-WINDOW // BLOCK) + 2
    kv = make_kv_cache(config, pages * len(kv_groups(config).windows), BLOCK, dtype, "cpu", alone())
    with substituted(listener.operations(operations("cpu"))), torch.no_grad():
        for window in windows:
            module.forward(params, kv, _batch(window, config), config, alone())
    return listener.squares(), sum(map(len, windows))


class _Listener:
    """Sums the squares of what the weights of `names`, by their identities, are multiplied by."""

    def __init__(self, names: dict[int, tuple[str, ...]]) -> None:
        self._names = names
        self._sums: dict[int, torch.Tensor] = {}
        self._rows: dict[int, int] = {}

    def operations(self, base: Operations) -> Operations:
        def linear(x: torch.Tensor, weight: Any, bias: torch.Tensor | None) -> torch.Tensor:
            self._hear(x, weight)
            return base.linear(x, weight, bias)

        def gated_linear(x: torch.Tensor, weight: Any, bias: torch.Tensor | None, activation: str) -> torch.Tensor:
            self._hear(x, weight)
            return base.gated_linear(x, weight, bias, activation)

        return base._replace(linear=linear, gated_linear=gated_linear)

    def squares(self) -> Squares:
        """Raises ModelError where a number is not finite."""
        found: Squares = {}
        for weight, names in self._names.items():
            if weight in self._sums:
                mean = (self._sums[weight] / self._rows[weight]).float().numpy()
                if not np.isfinite(mean).all():
                    raise ModelError(f"the inputs of {names[0]} are not finite over this text: leave --calibrate out")
                found |= dict.fromkeys(names, mean)
        return found

    def _hear(self, x: torch.Tensor, weight: object) -> None:
        if (key := id(weight)) in self._names:
            self._sums[key] = self._sums.get(key, 0.0) + x.float().square().sum(0, dtype=torch.float64)
            self._rows[key] = self._rows.get(key, 0) + len(x)


def _windows(folder: Path, text: Path, config: ModelConfig) -> Iterable[list[int]]:
    """Tokens of the text, each window with those that begin every text of the model."""
    try:
        tokenizer = Tokenizer.from_str(tokenizer_json(folder).decode())
        ids, begin = (tokenizer.encode(each).ids for each in (text.read_text(encoding="utf-8"), ""))
    except (OSError, ValueError) as error:
        raise ModelError(f"{text} cannot be read as text ({reason(error)}); give --calibrate a file of UTF-8") from error
    if len(ids) < WINDOW:
        raise ModelError(f"{text} has {len(ids)} tokens, and a calibration needs {WINDOW} or more: give a longer text")
    size = min(WINDOW, config.position_count_max) - len(begin)
    starts = range(len(begin), len(ids) - size + 1, size)
    return ([*begin, *ids[start : start + size]] for start in starts[:WINDOWS_MAX])


def _batch(tokens: list[int], config: ModelConfig) -> ForwardBatch:
    """One row from its first token on, its blocks one behind the other."""
    count = len(tokens)
    groups, places = len(kv_groups(config).windows), np.arange(count, dtype=np.int64)
    blocks = np.arange(1, -(-count // BLOCK) + 1)
    starts, lengths = np.array([0, count], np.int32), np.array([count], np.int32)
    every = []
    for group in range(groups):
        pages = blocks * groups + group
        slots = pages[places // BLOCK] * BLOCK + places % BLOCK
        every.append(GroupPlaces(torch.from_numpy(slots), torch.from_numpy(pages[None].astype(np.int32))))
    (slots, table), *others = every
    return ForwardBatch(
        token_ids=torch.tensor(tokens), positions=torch.from_numpy(places), slots=slots, query_starts=torch.from_numpy(starts),
        context_lengths=torch.from_numpy(lengths), block_table=table, sample_at=torch.tensor([count - 1]),
        host=HostBatch(starts, lengths), groups=tuple(others),
    )  # fmt: skip
