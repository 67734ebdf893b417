"""Benchmark of a whole decode step of the 8 B Llama shape on a GPU: embedding, layers, logits, sampling; random bfloat16 weights.

Owns the weights and the order of the step, which is that of `vnext/models/layers/decoder.py` layer by layer. The attention
metadata is built beforehand, so that the step can be one graph; bench_gap measures the time between steps. The last figures are
the cost of products of one fixed shape (`--deterministic`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib.util import find_spec
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from perf.gpu import bench_gap
from perf.gpu.bench_rows import inputs_of
from perf.gpu.place import Place
from perf.gpu.report import Figure, figure
from perf.gpu.timing import Times
from vnext.kernels.calls import AttentionStep
from vnext.kernels.cuda.operations import sample_rows
from vnext.kernels.format import format_of
from vnext.kernels.table import Operations

if TYPE_CHECKING:
    from vnext.models.config.model_config import ModelConfig
    from vnext.models.layers.decoder import Params

BF16 = torch.bfloat16
WEIGHT_STD = 0.02
ERROR_MAX = 0.05
"""Of logits after all layers, by its norm: two orders of bfloat16 roundings."""
BLOCK_SIZE = 16
SINGLE, MANY = (1, 1024), (256, 1024)
TOY_SINGLE, TOY_MANY = (1, 20), (3, 33)
SINGLE_MOST, MANY_LEAST, FIXED_MOST = 1.25, 0.80, 1.10


def run(place: Place, copy_rate: float | None) -> Iterator[tuple[tuple[Figure, ...], dict[str, Any]]]:
    """Figures and details of both batches."""
    missing = [name for name in ("msgspec", "safetensors") if find_spec(name) is None]
    if missing:
        yield (), {"8B decode step": {"missing": f"the models need {' and '.join(missing)}; bring wheels and set WHEELS"}}
        return
    config = model_config(place.is_dry)
    params = random_params(place, config)
    matrix_rate = place.clock.matrix_rate()
    shapes = (TOY_SINGLE, TOY_MANY) if place.is_dry else (SINGLE, MANY)
    alone_times, measured = single(place, config, params, *shapes[0], copy_rate)
    yield measured
    many_times, measured = many(place, config, params, *shapes[1], copy_rate, matrix_rate)
    yield measured
    yield from bench_gap.run(place, config, params[0])
    del params
    yield fixed(place, config, shapes, [alone_times, many_times])


def model_config(is_toy: bool) -> ModelConfig:
    """Llama 3.1 8B, or a toy."""
    from vnext.models.config.model_config import ModelConfig
    from vnext.models.config.rope_config import Rope

    sizes = (300, 64, 96, 2, 4, 2, 16) if is_toy else (128_256, 4096, 14_336, 32, 32, 8, 128)
    names = ("vocab_size", "hidden_size", "intermediate_size", "layer_count", "head_count", "kv_head_count", "head_dim")
    return ModelConfig(
        architecture="LlamaForCausalLM", **dict(zip(names, sizes, strict=True)), position_count_max=131_072, rms_norm_eps=1e-5,
        rope=Rope(theta=500_000.0), tie_embeddings=False, attention_bias=False, mlp_bias=False, dtype="bfloat16",
        bos_token_id=None, eos_token_ids=(),
    )  # fmt: skip


class RandomSource:
    """A family's source of weights: N(0, 0.02^2), norms 1, drawn on the device, in a format of kernels/format.py."""

    def __init__(self, place: Place, config: ModelConfig, form: str) -> None:
        self._place, self._config, self._format = place, config, format_of(form)
        self._generator = torch.Generator(place.device).manual_seed(5)
        self.bytes = 0

    def __contains__(self, name: str) -> bool:
        return True

    def fused(self, names: tuple[str, ...]) -> torch.Tensor:
        shapes = [self._shape(name) for name in names]
        shape = (sum(each[0] for each in shapes), *shapes[0][1:])
        self.bytes += prod(shape) * BF16.itemsize
        if len(shape) == 1:
            return torch.ones(shape, dtype=BF16, device=self._place.device)
        drawn = torch.empty(shape, dtype=BF16, device=self._place.device)
        return drawn.normal_(std=WEIGHT_STD, generator=self._generator)

    def table(self, name: str) -> torch.Tensor:
        return self.fused((name,))

    def packed(self, names: tuple[str, ...], *, exact: bool = False) -> Any:
        return self._place.operations.pack_weight(self.fused(names), self._format)

    def packed_gated(self, names: tuple[str, ...]) -> Any:
        return self._place.operations.pack_gated_weight(self.fused(names), self._config.activation, self._format)

    def place(self, values: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(values).to(self._place.device)

    def _shape(self, name: str) -> tuple[int, ...]:
        config = self._config
        heads, kv_heads = config.head_count * config.head_dim, config.kv_head_count * config.head_dim
        hidden, wide = config.hidden_size, config.intermediate_size
        known = {
            "embed_tokens": (config.vocab_size, hidden), "lm_head": (config.vocab_size, hidden), "q_proj": (heads, hidden),
            "k_proj": (kv_heads, hidden), "v_proj": (kv_heads, hidden), "o_proj": (hidden, heads), "gate_proj": (wide, hidden),
            "up_proj": (wide, hidden), "down_proj": (hidden, wide),
        }  # fmt: skip
        return known.get(name.split(".")[-2], (hidden,))


def random_params(place: Place, config: ModelConfig, form: str = "plain") -> tuple[Params, int]:
    """Return the parameters and the bytes a step reads: all but the embedding, of which it reads only some rows."""
    from vnext.models.families.llama import assemble

    source = RandomSource(place, config, form)
    params = assemble(source, config)
    return params, source.bytes - config.vocab_size * config.hidden_size * BF16.itemsize


class Decode:
    """One decode step of `rows` rows of `context` tokens each; it computes the last token."""

    def __init__(self, place: Place, config: ModelConfig, params: Params, rows: int, context: int) -> None:
        width = -(-context // BLOCK_SIZE)
        sizes = (rows * width + 1, config.kv_head_count, BLOCK_SIZE, config.head_dim)
        generator = torch.Generator(place.device).manual_seed(6)
        self.kv = [
            tuple(torch.empty(sizes, dtype=BF16, device=place.device).normal_(generator=generator) for _ in range(2))
            for _ in range(config.layer_count)
        ]
        order = torch.randperm(rows * width, generator=torch.Generator().manual_seed(7)) + 1
        self.table = order.view(rows, width).int().to(place.device)
        self.slots = self.table[:, -1].long() * BLOCK_SIZE + (context - 1) % BLOCK_SIZE
        self.positions = torch.full((rows,), context - 1, device=place.device)
        self.token_ids = torch.arange(rows, device=place.device) % config.vocab_size
        self.host = (np.arange(rows + 1), np.full(rows, context))
        self.columns = inputs_of(rows, 0, 1.0, place.device).columns()
        self.config, self.params, self.rows = config, params, rows

    def logits_by(self, operations: Operations) -> Callable[[], torch.Tensor]:
        """Return the step up to its logits, float32 [rows, vocabulary]."""
        from vnext.models.layers.decoder import run_layer
        from vnext.models.layers.layers import Step
        from vnext.models.layers.rope import rotary_angles
        from vnext.models.layers.sharding import alone

        config, params = self.config, self.params
        metadata = operations.attention_metadata(AttentionStep(*self.host, self.table, BLOCK_SIZE, config.kv_head_count))

        def logits() -> torch.Tensor:
            angles = rotary_angles(self.positions, params.frequencies, config.rope)
            step = Step(operations, config, alone(), self.slots, metadata, *angles, config.head_dim**-0.5, 0)
            residual = operations.embedding_rows(params.embedding, self.token_ids, 0)
            normed = operations.rms_norm(residual, params.layers[0].attention_norm, config.rms_norm_eps)
            next_norms = [layer.attention_norm for layer in params.layers[1:]] + [params.norm]
            for layer, cache, next_norm in zip(params.layers, self.kv, next_norms, strict=True):
                normed, residual = run_layer(layer, cache, normed, residual, next_norm, step)
            return operations.logits(normed, params.head)

        return logits

    def check(self, place: Place) -> float:
        """Compare the logits with those of the references. Raises AssertionError."""
        found, expected = self.logits_by(place.operations)().double(), self.logits_by(place.plain)().double()
        error = float((found - expected).norm() / expected.norm())
        assert error <= ERROR_MAX, f"logits are off by {error:.2e} of their norm, {ERROR_MAX} allowed"
        return error

    def step(self, place: Place) -> Callable[[], torch.Tensor]:
        """Return the whole step, which returns tokens."""
        logits = self.logits_by(place.operations)
        return lambda: sample_rows(logits(), self.columns)

    @property
    def kv_bytes(self) -> int:
        return sum(cache.nbytes for pair in self.kv for cache in pair)


def single(
    place: Place, config: ModelConfig, made: tuple[Params, int], rows: int, context: int, copy_rate: float | None
) -> tuple[Times, tuple[tuple[Figure, ...], dict[str, Any]]]:
    """One row: the bytes of the weights are the lower bound."""
    params, weight_bytes = made
    decode = Decode(place, config, params, rows, context)
    error, times = decode.check(place), place.clock.times(decode.step(place))
    ratio = times.best_us * 1e-6 / (weight_bytes / copy_rate) if times.best_us and copy_rate else None
    name = "8B decode step, batch 1"
    figures = (
        figure(f"{name}: of weights / copy bandwidth", ratio, "times", at_most=SINGLE_MOST),
        figure(name, times.best_us, "us"),
    )
    return times, (figures, {name: times._asdict() | {"error": error, "weight_bytes": weight_bytes}})


def many(
    place: Place, config: ModelConfig, made: tuple[Params, int], rows: int, context: int, copy_rate: float | None,
    matrix_rate: float | None,
) -> tuple[Times, tuple[tuple[Figure, ...], dict[str, Any]]]:  # fmt: skip
    """Many rows: the lower bound is the larger of the time to read weights and caches once and the time of the products."""
    params, weight_bytes = made
    decode = Decode(place, config, params, rows, context)
    times = place.clock.times(decode.step(place))
    share = None
    if times.best_us and copy_rate and matrix_rate:
        floor_s = max((weight_bytes + decode.kv_bytes) / copy_rate, rows * weight_bytes / matrix_rate)
        share = floor_s / (times.best_us * 1e-6)
    name = f"8B decode step, batch {MANY[0]} at 1k"
    figures = (figure(f"{name}: of its roofline", share, "", at_least=MANY_LEAST), figure(name, times.best_us, "us"))
    details = {"weight_bytes": weight_bytes, "kv_bytes": decode.kv_bytes, "matrix_rate": matrix_rate}
    return times, (figures, {name: times._asdict() | details})


def fixed(
    place: Place, config: ModelConfig, shapes: tuple[tuple[int, int], ...], plain: list[Times]
) -> tuple[tuple[Figure, ...], dict[str, Any]]:
    """The same steps with products of one fixed shape, beside products of the batch's shape."""
    params, _ = random_params(place, config, "fixed")
    figures, details = [], {}
    for (rows, context), before in zip(shapes, plain, strict=True):
        times = place.clock.times(Decode(place, config, params, rows, context).step(place))
        ratio = times.best_us / before.best_us if times.best_us and before.best_us else None
        name = f"--deterministic, batch {SINGLE[0] if (rows, context) == shapes[0] else MANY[0]}"
        figures.append(figure(f"{name}: takes", ratio, "times", at_most=FIXED_MOST))
        details[name] = times._asdict()
    return tuple(figures), details
