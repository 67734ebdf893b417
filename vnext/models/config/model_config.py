"""Model configuration: the contents of a checkpoint's config.json, checked once and in vnext's terms.

Owns the fields that families share and their parsing; each family's file parses the keys of that family. Ignores keys that do
not change the arithmetic, and refuses unsupported keys that would. Reads two files.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

import msgspec
from msgspec.structs import replace

from vnext.base.tokenizer_files import special_token
from vnext.kernels.calls import Router
from vnext.models.config.folder import OVERRIDDEN, architecture, read_config, settings_of, stored_dtype
from vnext.models.config.json_keys import Json, flag, number, positive, read_optional_json, required, shown, token_ids
from vnext.models.config.layer_kinds import Encoder, Heads, Hosted, Latent, LayerInputs, SharedBlocks, Stage
from vnext.models.config.pooling import Pooling, pooling_in
from vnext.models.config.rope_config import ASKED_LENGTH, Rope, parse_rope, reach, scaling_of
from vnext.models.config.streams import Joined, StreamSizes
from vnext.models.config.tower_config import SoundTower, Tower
from vnext.models.errors import ModelError
from vnext.models.registry import family

ACTIVATIONS = MappingProxyType({"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh", "gelu_new": "gelu_tanh"})
"""Hugging Face's names and the kernels'."""
PLAIN_ACTIVATIONS = MappingProxyType(
    {"gelu_pytorch_tanh": "gelu_tanh", "gelu_new": "gelu_tanh", "gelu": "gelu", "relu2": "relu2", "xielu": "xielu"}
)
"""The same, of MLPs without a gate."""
ENDS = "eos_token_id"
TOKENIZER_END = "tokenizer_eos_token_id"
"""Key beside those of config.json: the number of the tokenizer's own end token."""
DTYPES = ("float32", "bfloat16", "float16")


class Experts(msgspec.Struct, frozen=True, kw_only=True):
    """Layers whose MLP is `count` experts of `intermediate_size`, among which `router` chooses for each token.

    `dense_layers`: indices of layers without any. `shared_size`: of an MLP that every token goes through beside them; 0 for none.
    `input_size`: of what they read, 0 for that of the stream. `scales_inputs`: a share multiplies what the one expert of a token
    reads, not what it gives. `whole_group`: the number of neighbouring inputs of `down` that share a scale; no shard divides
    them. `idle`: the number of experts behind these that return their input. With `ahead` they read what the MLP of their layer
    reads, which has them beside it, and what they give is added behind the next one. `activation`: "" for the model's.
    """

    count: int
    intermediate_size: int
    router: Router
    dense_layers: tuple[int, ...] = ()
    shared_size: int = 0
    input_size: int = 0
    scales_inputs: bool = False
    whole_group: int = 1
    idle: int = 0
    ahead: bool = False
    activation: str = ""

    @property
    def per_token(self) -> int:
        return self.router.per_token


class DecoderForm(msgspec.Struct, frozen=True, kw_only=True):
    """What a decoder's layers do beside what their parameters and the configuration show.

    `is_parallel`: attention and MLP read the same stream, and both are added to it. Scales multiply the embedding, what attention
    and MLP give before it is added, and the logits. `head_norms`: norms of queries and keys are over each head, over each after it
    has turned, over all heads together, or, "bare", over each without a weight. `output_bias`: as attention_bias, of attention's
    output. `turns_neighbours`: the channels of a pair that turns are neighbours. `is_by_head`: the product has query, key and value
    of a head side by side. `query_growth`: (b, n, m) where queries at position p are multiplied by 1 + b * log(1 + (p + m) // n),
    as in Llama 4; those of layers without rotation alone if `grows_still`. `sees_runs`: a window is a run of tokens that begins at
    a multiple of its size. `is_gated`: a query head comes with a gate of its size, whose sigmoid multiplies what the head gives;
    with `gates_apart` all stand behind all queries, else each behind its own; with `gates_heads` they are one number each, behind
    all queries; `softplus_gates` have that in the sigmoid's place. `has_sinks`: each head's softmax has a score without a key.
    `head_bias`: the head has one. `norms_values`: values are normed over each head. `mlp_scales` multiply what an MLP gets and what
    it gives, None for nothing. `shares`, where they are not (): each of attention, recurrent layers and MLPs adds what it gives
    times the second number to its normed input times the first. `mean_square`: norms are by the root mean square in a family of
    layer norms. `fine_eps`: of norms behind attention and MLP, where they have one of their own. `values`, where they are narrower
    than keys or scaled: their size, and what multiplies them.
    """

    is_parallel: bool = False
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    logits_scale: float = 1.0
    head_norms: Literal["each", "turned", "all", "bare"] = "each"
    output_bias: bool = False
    turns_neighbours: bool = False
    is_by_head: bool = False
    query_growth: tuple[float, int, int] | None = None
    grows_still: bool = False
    sees_runs: bool = False
    is_gated: bool = False
    gates_apart: bool = False
    gates_heads: bool = False
    softplus_gates: bool = False
    has_sinks: bool = False
    head_bias: bool = False
    norms_values: bool = False
    mlp_scales: tuple[float, float] | None = None
    shares: tuple[tuple[float, float], ...] = ()
    mean_square: bool = False
    fine_eps: float = 0.0
    values: tuple[int, float] | None = None

    @property
    def fits_one_call(self) -> bool:
        """Whether the kernels have layers of this form as one call."""
        is_other = self.grows_still or self.sees_runs or self.values or self.softplus_gates
        return not (is_other or (self.query_growth and self.head_norms == "turned"))


class Recurrent(msgspec.Struct, frozen=True, kw_only=True):
    """Layers that keep, in the place of keys and values, a state of one size a request: the last inputs of a convolution over
    `width` tokens, if there is more than one, and of each value head, where `key_dim` is not 0, key_dim x value_dim numbers.

    `layers` are rising. Heads of keys are shared by as many neighbouring heads of values. The convolution's channels are those of
    queries, keys and values; it may have a bias. Of Mamba-2, `scales` multiply gates, values, keys, queries and steps, () for
    nothing, and there may be no norm. `step_rank`: of so many numbers steps are made, one for each value (Mamba) or each key (Kimi
    Linear); 0 where they are products with the input, one for each head. `bound` and `strength_scale` are a delta's, as in
    RecurrenceCall. `norm_eps`: of norms over heads, 0 for rms_norm_eps. `beside`: of layers that attend, too, what multiplies the
    input of attention, what it gives, and what is beside it. `idle` layers, of models whose layers are one thing each, are an MLP
    alone. `blocks`: of layers before which a block attends.
    """

    layers: tuple[int, ...]
    width: int
    value_heads: int
    value_dim: int = 1
    key_heads: int = 0
    key_dim: int = 0
    has_bias: bool = False
    has_norm: bool = True
    scales: tuple[float, ...] = ()
    step_rank: int = 0
    bound: float = 0.0
    strength_scale: float = 1.0
    norm_eps: float = 0.0
    beside: tuple[float, float, float] | None = None
    idle: tuple[int, ...] = ()
    blocks: SharedBlocks | None = None

    @property
    def keys(self) -> int:
        return self.key_heads * self.key_dim

    @property
    def values(self) -> int:
        return self.value_heads * self.value_dim


USUAL_LAYERS = 3
"""The layers of a target that a head reads where its configuration names none."""
HEAD_ARCHITECTURE = "LlamaForCausalLMEagle3"


class DraftHead(msgspec.Struct, frozen=True, kw_only=True):
    """What a head that drafts for another model has beside its own layer: `vocab_size` tokens that it knows, and the `layers` of
    the target, rising, whose inputs of `target_size` it reads; () for the usual ones. `norm_before_residual`: what it adds to
    is normed."""

    vocab_size: int
    target_size: int
    layers: tuple[int, ...] = ()
    norm_before_residual: bool = False

    @property
    def layer_count(self) -> int:
        return len(self.layers) or USUAL_LAYERS


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True):
    """A decoder-only model, or an encoder. `dtype` is the checkpoint's own; `position_count_max` the longest context in tokens.

    `rms_norm_eps` applies to every norm. `windows`: per layer the tokens that attention sees, 0 for all; () if all layers see
    all. `local_rope`: the rope of the layers with a window, if it differs. `still_layers`: layers without rotation.
    `query_scale`: the factor of the scores, None for head_dim ** -0.5. Softcaps are 0.0 where there is none. `mtp_layers`: how many
    layers for multi-token prediction the checkpoint has beside `layer_count`. `stage`: which of a whole model's layers these are
    (stages.py); None for all. `form`: how the layers differ from Llama's. `recurrent`: the layers that have a state in the place of
    keys and values, None where all attend. `hosted`: of a model that transformers computes. `encoder`: of one that writes nothing;
    a request has one token more than its text. `pooling`: of vectors, None where no file says so. `latent`: of layers that keep
    one row of `head_dim` numbers for all heads; `kv_head_count` is then 1. `whole_heads`: the heads of the layers without a window,
    if they differ. `cache_layers`: per layer whose keys and values it reads, () if all have their own. `mlp_sizes`: per layer the
    width of its MLP, () if all have `intermediate_size`. `gate_cutoffs`: per layer how many standard deviations above their mean
    gates begin to count, () or None where all do. `layer_inputs`: what tokens give to each layer, None for nothing. `streams`: of
    layers of several, `joined` where they are joined. `tower`: what makes vectors of images; `sound`: of a prompt's sound.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    layer_count: int
    head_count: int
    kv_head_count: int
    head_dim: int
    position_count_max: int
    rms_norm_eps: float
    rope: Rope
    tie_embeddings: bool
    attention_bias: bool
    mlp_bias: bool
    dtype: str
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    activation: str = "silu"
    windows: tuple[int, ...] = ()
    local_rope: Rope | None = None
    still_layers: tuple[int, ...] = ()
    query_scale: float | None = None
    attention_softcap: float = 0.0
    logits_softcap: float = 0.0
    experts: Experts | None = None
    head: DraftHead | None = None
    mtp_layers: int = 0
    stage: Stage | None = None
    form: DecoderForm = DecoderForm()
    recurrent: Recurrent | None = None
    hosted: Hosted | None = None
    encoder: Encoder | None = None
    pooling: Pooling | None = None
    latent: Latent | None = None
    whole_heads: Heads | None = None
    cache_layers: tuple[int, ...] = ()
    mlp_sizes: tuple[int, ...] = ()
    gate_cutoffs: tuple[float | None, ...] = ()
    layer_inputs: LayerInputs | None = None
    streams: StreamSizes | None = None
    joined: Joined | None = None
    tower: Tower | None = None
    sound: SoundTower | None = None

    @property
    def turning_dim(self) -> int:
        """The numbers of a head of which a share turns."""
        return self.latent.turning if self.latent else self.head_dim

    @property
    def attending_layers(self) -> tuple[int, ...]:
        """The layers that have keys and values, counted from the first of these layers."""
        recurrent = self.recurrent
        if recurrent is not None and recurrent.blocks is not None:
            return recurrent.blocks.layers
        without = {*recurrent.idle, *(recurrent.layers if recurrent.beside is None else ())} if recurrent else ()
        return tuple(layer for layer in range(self.layer_count) if layer not in without)

    @property
    def attending_windows(self) -> tuple[int, ...]:
        return tuple(self.windows[layer] if self.windows else 0 for layer in self.attending_layers)

    @property
    def head_dim_max(self) -> int:
        return max(self.head_dim, self.whole_heads.head_dim if self.whole_heads else 0)

    @property
    def has_unlike_layers(self) -> bool:
        """Whether layers differ in the size of heads, read one another's caches or have inputs of their own."""
        return self.whole_heads is not None or self.cache_layers != () or self.layer_inputs is not None

    @property
    def layer_numbers(self) -> range:
        """The layers by their numbers in the checkpoint."""
        first = self.stage.first_layer if self.stage else 0
        return range(first, first + self.layer_count)

    @property
    def input_cost(self) -> float:
        """As how many tokens the encoding of one of an image's or a sound's costs, in multiplications; 0 without a tower."""
        tower = self.tower or self.sound
        heads = self.head_count + self.kv_head_count
        layer = self.hidden_size * (2 * heads * self.head_dim + 3 * self.intermediate_size)
        return 0.0 if tower is None else tower.products / (layer * self.layer_count)

    @property
    def is_first(self) -> bool:
        return self.stage is None or self.stage.index == 0

    @property
    def is_last(self) -> bool:
        return self.stage is None or self.stage.index == self.stage.count - 1


@cache
def without_windows(config: ModelConfig) -> ModelConfig:
    """The configuration as the layers without a window have it."""
    heads = config.whole_heads
    if heads is None:
        return config
    count = heads.head_count or config.head_count
    return replace(config, head_count=count, kv_head_count=heads.kv_head_count, head_dim=heads.head_dim)


def load_config(path: Path, with_generation: bool = True, asked_length: int | None = None) -> ModelConfig:
    """The configuration of the checkpoint in folder `path`, its generation_config.json read or not. Raises ModelError.

    `asked_length`: tokens of one request that the user asks for; some models turn otherwise for longer ones.
    """
    generation = read_optional_json(path / "generation_config.json") if with_generation else {}
    raw = with_dtype(path, read_config(path))
    config = parse_config(raw | {ASKED_LENGTH: asked_length or 0, TOKENIZER_END: special_token(path)}, generation)
    return with_pooling(config, pooling_in(path, raw), path)


def with_pooling(config: ModelConfig, found: Pooling | None, path: Path) -> ModelConfig:
    """The configuration with what the folder's files say of vectors, else, of an encoder, with what sentence-transformers takes.
    Raises ModelError."""
    pooling = found or (Pooling(kind="mean") if config.encoder else None)
    if config.encoder and pooling and pooling.length_max:
        config = replace(config, position_count_max=min(config.position_count_max, pooling.length_max + 1))
    if config.encoder and found and found.scores and config.encoder.types > 1:
        if (separator := special_token(path, "sep_token")) is None:
            raise ModelError(f"the tokenizer in {path} names no sep_token, behind which a second text has another type; add it")
        encoder = replace(config.encoder, separator=separator)
        config = replace(config, encoder=encoder)
    return replace(config, pooling=pooling)


def with_dtype(path: Path, raw: Json) -> Json:
    """The contents of config.json in folder `path`, with the tensors' dtype where it names none. Raises ModelError."""
    text = raw.get("text_config")
    parts = (raw, text if isinstance(text, dict) else {})
    if any(part.get("dtype") or part.get("torch_dtype") for part in parts):
        return raw
    return raw | {"dtype": stored_dtype(path)}


def load_head_config(path: Path) -> ModelConfig:
    """The configuration of the EAGLE-3 head in folder `path`, whatever its authors call the architecture. Raises ModelError."""
    raw = with_dtype(path, read_config(path))
    named = architecture(raw)
    if "eagle3" not in named.lower() and "draft_vocab_size" not in raw:
        raise ModelError(f"{path} holds no EAGLE-3 head, its config.json names {named}: name a head, or take method draft_model")
    return parse_config(raw | {"architectures": [HEAD_ARCHITECTURE]}, {})


def parse_config(raw: Json, generation: Json) -> ModelConfig:
    """config.json and generation_config.json (may be empty) as one configuration. Raises ModelError."""
    try:
        raw = raw | {"architectures": [architecture(raw)]}
        config: ModelConfig = family(raw["architectures"][0]).parse(raw, generation)
        check_heads(config)
    except (TypeError, ValueError, ArithmeticError, LookupError, AttributeError) as error:  # no reader foresees every form
        raise ModelError(f"config.json has a value of the wrong type ({error}); correct config.json") from error
    return config


def common_config(raw: Json, generation: Json, **own: Any) -> ModelConfig:
    """The configuration with the fields that most families spell alike; `own` fields of the family come first. `partial`: heads may
    turn in part."""
    settings_of(raw)  # refuses what is not read
    head_count, hidden_size = positive(raw, "num_attention_heads"), positive(raw, "hidden_size")
    head_dim = positive(raw, "head_dim", hidden_size // head_count)
    turning, partial = own.pop("rope", None), own.pop("partial", False)
    rope = turning or parse_rope(raw, scaling_of(raw), head_dim, partial=partial)
    longest = reach(rope, positive(raw, "max_position_embeddings", 2048))
    fields: Json = dict(
        architecture=raw["architectures"][0],
        vocab_size=positive(raw, "vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=positive(raw, "intermediate_size"),
        layer_count=positive(raw, "num_hidden_layers"),
        head_count=head_count,
        kv_head_count=positive(raw, "num_key_value_heads", head_count),
        head_dim=head_dim,
        position_count_max=longest,
        rms_norm_eps=number(raw, "rms_norm_eps", 1e-6),
        rope=rope,
        tie_embeddings=flag(raw, "tie_word_embeddings"),
        attention_bias=flag(raw, "attention_bias"),
        mlp_bias=flag(raw, "mlp_bias"),
        dtype=checkpoint_dtype(raw),
        bos_token_id=(token_ids(generation, "bos_token_id") or token_ids(raw, "bos_token_id") or (None,))[0],
        eos_token_ids=end_tokens(raw, generation),
        activation=own.pop("activation", None) or activation(raw, "hidden_act"),
    )
    windows = own.pop("windows", ())
    if own.get("local_rope") is None and all(window == 0 or window >= longest for window in windows):
        windows = ()
    return ModelConfig(**{**fields, **own, "windows": windows})


def end_tokens(raw: Json, generation: Json) -> tuple[int, ...]:
    """The tokens that end an answer by either file or by the tokenizer; by an override alone, where there is one."""
    own = token_ids(generation, ENDS)
    if ENDS in generation.get(OVERRIDDEN, ()):
        return own
    tokenizer = (end for end in token_ids(raw, TOKENIZER_END) if end < positive(raw, "vocab_size"))
    return tuple(dict.fromkeys((*own, *token_ids(raw, ENDS), *tokenizer)))


def layer_windows(raw: Json, usual: Sequence[str]) -> tuple[int, ...]:
    """Each layer's window: that of layers of the kind sliding_attention is sliding_window. `usual`: without layer_types."""
    kinds = raw.get("layer_types") or usual
    if len(kinds) != len(usual) or not set(kinds) <= {"full_attention", "sliding_attention"}:
        raise ModelError(
            f"layer_types must name full_attention or sliding_attention for each of {len(usual)} layers but is "
            f"{list(kinds)}; correct config.json"
        )
    return tuple(positive(raw, "sliding_window") if kind == "sliding_attention" else 0 for kind in kinds)


def same_window(raw: Json) -> tuple[int, ...]:
    """One window for all layers, if the configuration has one."""
    window = 0 if raw.get("sliding_window") is None else positive(raw, "sliding_window")
    return (window,) * positive(raw, "num_hidden_layers")


def activation(raw: Json, key: str, known: Mapping[str, str] = ACTIVATIONS) -> str:
    """The kernels' name of an activation."""
    name = raw.get(key) or "silu"
    if name not in known:
        raise ModelError(f"{key} {shown(name)} is not supported; supported are {', '.join(known)}")
    return known[name]


def text_part(raw: Json) -> Json:
    """The configuration of the language part of a multimodal model, which stands in text_config."""
    text = {key: value for key, value in required(raw, "text_config", None).items() if value is not None}
    return raw | text | {"architectures": raw["architectures"]}


def checkpoint_dtype(raw: Json) -> str:
    """The dtype's plain name; older files say torch_dtype."""
    name = str(raw.get("dtype") or raw.get("torch_dtype") or "float32").removeprefix("torch.")
    if name not in DTYPES:
        raise ModelError(f"dtype {name!r} is not supported; supported are {', '.join(DTYPES)}")
    return name


def check_heads(config: ModelConfig) -> None:
    """Raise ModelError when queries cannot share the key-value heads or the head size cannot be rotated."""
    for heads, key in ((config, "num_key_value_heads"), (without_windows(config), "num_global_key_value_heads")):
        if heads.head_count % heads.kv_head_count:
            raise ModelError(
                f"{heads.head_count} attention heads cannot share {heads.kv_head_count} key-value heads evenly; "
                f"correct {key} in config.json"
            )
    if int(config.turning_dim * config.rope.share) % 2:
        raise ModelError(f"head_dim must be even for rotary embedding but is {config.head_dim}; correct config.json")
