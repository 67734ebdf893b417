"""The family of all models that transformers computes: configuration and weights by the model's skeleton, steps by its own code.

Owns how its modules run: with the cache and the attention of a step in the place of their own.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import NamedTuple

import numpy as np
import torch
from transformers.modeling_outputs import BaseModelOutputWithPast
from transformers.modeling_utils import PreTrainedModel

from vnext.kernels.arrays import Array, as_tensor, torch_dtype
from vnext.models.config.json_keys import Json, token_ids
from vnext.models.config.layer_kinds import Hosted
from vnext.models.config.model_config import ModelConfig, checkpoint_dtype, end_tokens
from vnext.models.config.rope_config import ASKED_LENGTH, Rope
from vnext.models.errors import ModelError
from vnext.models.hosted.description import EXPERT_WEIGHTS, Description, Kind, Weight, describe, set_module, set_product
from vnext.models.hosted.modules import Experts, Head, Product, Replaced, Run, embedding, router, table
from vnext.models.hosted.own_code import NOT_SERVED
from vnext.models.hosted.skeleton import (
    base_of,
    call_base,
    make_buffers,
    make_model,
    place_attention,
    replace_functions,
    require_numbers,
    set_weight,
)
from vnext.models.layers.assembly import Source, embeddings
from vnext.models.layers.batch import ForwardBatch
from vnext.models.layers.kv_cache import KvCache
from vnext.models.layers.layers import Linear, Step, layer_steps, operations
from vnext.models.layers.sharding import Layout, Parallel

# ---- running -------------------------------------------------------------------------------------------------------
# Running: a model of transformers with its weights, and the steps that it computes.
# One call of the model's base with all tokens of a step, and one of what follows it with the sampled ones' states: whatever
# scales or caps logits is the model's own too.

COMPARED_ROWS = 5
POSITIONS_MAX = 1000


class GivenStates(BaseModelOutputWithPast):
    """What a base gives, of which all but the states is None under any name."""

    def __getattr__(self, name: str) -> None:
        if name.startswith("_"):
            raise AttributeError(name)
        return None


class Given:
    """Stands in the place of a model's base: its states are given."""

    hidden: torch.Tensor

    def __call__(self, *_: object, **__: object) -> GivenStates:
        return GivenStates(last_hidden_state=self.hidden)

    @property
    def decoder(self) -> Given:
        return self


class HostedModel:
    """A model whose weights lie among the parameters beside it, but for those in `packed_beside`."""

    def __init__(self, model: PreTrainedModel, run: Run, is_replaced: bool, beside: tuple[object, ...]) -> None:
        """`beside`: packed weights that do not lie among the parameters."""
        self._whole, self._run, self._given, self._is_replaced, self.packed_beside = model, run, Given(), is_replaced, beside
        self._base = base_of(model)
        name = str(model.base_model_prefix)
        del model._modules[name]
        model.__dict__[name] = self._given

    @contextmanager
    def _of(self, positions: torch.Tensor, steps: Sequence[Step], kv: KvCache, parallel: Parallel) -> Iterator[None]:
        run = self._run
        run.steps, run.kv, run.parallel, run.positions, run.turns = steps, kv, parallel, positions, {}
        try:
            yield
        finally:
            run.steps, run.kv = (), ()

    def states(self, batch: ForwardBatch, steps: Sequence[Step], kv: KvCache, parallel: Parallel) -> torch.Tensor:
        """The last layer's states of a step's tokens [T, hidden], normed."""
        with self._of(batch.positions, steps, kv, parallel):
            return self._states(batch.token_ids, batch.positions)

    def _states(self, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        with Replaced() if self._is_replaced else nullcontext():
            return call_base(self._base, ids[None], positions[None])[0]

    def logits(self, hidden: torch.Tensor, parallel: Parallel) -> torch.Tensor:
        """Those of states [S, hidden], as the model scales and caps them: float32 [S, V]."""
        self._run.parallel, self._given.hidden = parallel, hidden[None]
        found: torch.Tensor = self._whole(input_ids=None, use_cache=False).logits[0]
        return found.float()

    @torch.inference_mode()
    def require_rows(self, vocab_size: int, position_count: int, device: torch.device) -> None:
        """Raise ModelError unless tokens have the same bits alone and together, attention aside."""
        generator = torch.Generator().manual_seed(COMPARED_ROWS)
        sizes = (vocab_size, min(position_count, POSITIONS_MAX))
        ids, places = (torch.randint(size, (COMPARED_ROWS,), generator=generator).to(device) for size in sizes)
        together = self._states(ids, places)
        alone = torch.cat([self._states(ids[[row]], places[[row]]) for row in range(COMPARED_ROWS)])
        if not torch.equal(together.nan_to_num(), alone.nan_to_num()):
            raise ModelError(
                f"{type(self._whole).__name__} computes tokens otherwise alone than together, so --model-impl transformers "
                "cannot promise one answer in every batch and does not serve it"
            )


__all__ = ["WEIGHT_AXES", "assemble", "forward", "logits", "parse"]

LEFT_OUT = ("_attn_implementation", "attn_implementation", "quantization_config", "auto_map", "torch_dtype", "dtype", ASKED_LENGTH)
"""Members of config.json that transformers is not asked about: their dtypes and codes are the loader's."""


def WEIGHT_AXES(config: ModelConfig) -> Mapping[str, Layout]:  # noqa: N802  (a field of Family)
    """The layouts, by the tensors' whole names."""
    return describe(settings_of(config)).layouts


class Params(NamedTuple):
    """One rank's weights. `layers` are those between embedding and head; `model` computes with all of them, None where there are
    names alone. No `stack` of layers is one call."""

    embedding: Array
    layers: tuple[object, ...]
    norm: tuple[object, ...]
    head: Array
    head_bias: Array
    model: HostedModel | None
    stack: None = None


def settings_of(config: ModelConfig) -> str:
    assert config.hosted is not None
    return config.hosted.settings


def parse(raw: Json, generation: Json) -> ModelConfig:
    """The configuration, as transformers reads it. Raises ModelError."""
    kept = {key: value for key, value in raw.items() if key not in LEFT_OUT and not key.startswith(("vnext", "tokenizer_eos"))}
    settings = json.dumps(kept, sort_keys=True)
    found = describe(settings)
    for key in found.members:
        raw.get(key)
    calls = [call for _, call in found.attention]
    first, windows = calls[0], tuple(call.window if call.window < found.position_count_max else 0 for call in calls)
    for name, call in found.attention:
        if call._replace(window=0) != first._replace(window=0):
            raise ModelError(f"{name} has other heads than the layers before it, {NOT_SERVED}")
    return ModelConfig(
        architecture=raw["architectures"][0],
        vocab_size=found.vocab_size,
        hidden_size=found.width,
        intermediate_size=found.shared,
        layer_count=len(calls),
        head_count=first.heads,
        kv_head_count=first.kv_heads,
        head_dim=first.head_dim,
        position_count_max=found.position_count_max,
        rms_norm_eps=1e-6,
        rope=Rope(theta=1.0),
        tie_embeddings=found.is_tied,
        attention_bias=False,
        mlp_bias=False,
        dtype=checkpoint_dtype(raw),
        bos_token_id=(token_ids(generation, "bos_token_id") or token_ids(raw, "bos_token_id") or (None,))[0],
        eos_token_ids=end_tokens(raw | {"vocab_size": found.vocab_size}, generation),
        windows=windows if any(windows) else (),
        activation=found.activation,
        hosted=Hosted(settings=settings, whole=found.whole, is_biased=any(call.is_biased for call in calls)),
    )


def assemble(source: Source, config: ModelConfig) -> Params:
    """The parameters. Raises ModelError for stages, and for a model whose rows differ alone and together."""
    if config.stage is not None:
        raise ModelError("--model-impl transformers computes no stages of a model: leave --pipeline-parallel-size out")
    weights = describe(settings_of(config)).weights
    (first,), (last,) = ([each for each in weights if each.kind is kind] for kind in (Kind.EMBEDDING, Kind.HEAD))
    packed = embeddings(source, config, first.name, last.name)
    loaded = tuple(load(source, each) for each in weights)
    params = Params(packed[0], loaded, (), packed[1], source.wide(last.bias) if last.bias else None, None)
    if not hasattr(packed[0], "shape"):
        return params  # of names alone
    device = as_tensor(source.place(np.zeros(1, np.float32))).device
    return params._replace(model=filled(params, config, torch_dtype(source.dtype), device))


def load(source: Source, weight: Weight) -> Array:
    """A weight between embedding and head, which are apart."""
    name = (weight.name,)
    match weight.kind:
        case Kind.PRODUCT:
            return Linear(source.packed(weight.names), source.fused(weight.biases) if weight.biases else None)
        case Kind.EXPERTS:
            return source.stacked(weight.groups, weight.parameter == EXPERT_WEIGHTS[0])
        case Kind.WIDE | Kind.ROUTER:
            return source.wide(weight.name)
        case Kind.SCALAR:
            return source.scalar(weight.name)
        case Kind.TABLE | Kind.PLAIN:
            return source.fused(name)
        case _:
            return ()


def filled(params: Params, config: ModelConfig, dtype: torch.dtype, device: torch.device) -> HostedModel:
    """The model of these weights, which are not copied."""
    found, run = describe(settings_of(config)), Run()
    model = make_model(settings_of(config), dtype)
    make_buffers(model, device)
    place_attention(model, tuple(name for name, _ in found.attention), run)
    for each, weight in zip(found.weights, params.layers):
        put(model, each, weight, run)
    routers = put_routers(model, found.weights, params.layers, dtype, device)
    put_experts(model, found, params.layers, run)
    (first,) = (each for each in found.weights if each.kind is Kind.EMBEDDING)
    own = model.get_submodule(first.module)
    shape = config.vocab_size, own.get_parameter(first.parameter).shape[1]
    set_weight(own, first.parameter, embedding(as_tensor(params.embedding), shape, dtype, run))
    (last,) = (each for each in found.weights if each.kind is Kind.HEAD)
    set_module(model, last.module, Head(run, config, params.head, as_tensor(params.head_bias)))
    replace_functions(model)
    require_numbers(model)
    hosted = HostedModel(model, run, found.is_replaced, routers)
    hosted.require_rows(config.vocab_size, config.position_count_max, device)
    return hosted


def put_routers(
    model: PreTrainedModel, weights: tuple[Weight, ...], loaded: tuple[Array, ...], dtype: torch.dtype, device: torch.device
) -> tuple[object, ...]:
    """Put the routers' weights, float32, into their modules; returns them as packed."""
    found = []
    for each, weight in zip(weights, loaded):
        if each.kind is Kind.ROUTER:
            found.append(operations(device.type).pack_weight(as_tensor(weight)))
            set_weight(model.get_submodule(each.module), each.parameter, router(found[-1], tuple(weight.shape), dtype))
    return tuple(found)


def put_experts(model: PreTrainedModel, found: Description, loaded: tuple[Array, ...], run: Run) -> None:
    """Put the experts' weights into their modules."""
    parts = {(each.module, each.parameter): (weight, each) for each, weight in zip(found.weights, loaded) if each.groups}
    for name in {name for name, _ in parts}:
        (gate_up, each), (down, _) = (parts[name, key] for key in EXPERT_WEIGHTS)
        module = model.get_submodule(name)
        module.__dict__["vnext_experts"] = Experts(run, gate_up, down, found.activation, bool(each.style))
        module._parameters.clear()


def put(model: PreTrainedModel, each: Weight, weight: Array, run: Run) -> None:
    """Put a weight into its module."""
    module = model.get_submodule(each.module)
    match each.kind:
        case Kind.PRODUCT:
            linear = Linear(weight.weight, as_tensor(weight.bias))
            set_product(model, each, Product(run, linear.weight.shape[0], each.style == "rowwise", linear))
        case Kind.TABLE:
            set_weight(module, each.parameter, table(as_tensor(weight)))
        case Kind.SCALAR:
            set_weight(module, each.parameter, as_tensor(weight)[0].to(getattr(module, each.parameter).dtype))
        case Kind.PLAIN | Kind.WIDE:
            set_weight(module, each.parameter, as_tensor(weight))


def forward(
    params: Params, kv: KvCache, batch: ForwardBatch, config: ModelConfig, parallel: Parallel
) -> tuple[torch.Tensor, KvCache]:
    """Run one step: (normed hidden states [S, hidden] at batch.sample_at, the cache with this step's tokens)."""
    assert params.model is not None
    steps = layer_steps(kv, batch, config, parallel, None)
    return params.model.states(batch, steps, kv, parallel).index_select(0, batch.sample_at), kv


def logits(params: Params, hidden: torch.Tensor, config: ModelConfig, parallel: Parallel) -> torch.Tensor:
    """Hidden states [S, hidden] of `forward` -> float32 [S, vocab_size], whole on every rank."""
    assert params.model is not None
    return params.model.logits(hidden, parallel)
