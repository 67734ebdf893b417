"""Gemma 4, text only: two head sizes, shared caches, experts beside an MLP.

Values are normed, and keys stand in for them where config.json says so. Of multimodal models, it serves the language part.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from vnext.kernels.calls import Router
from vnext.models.config.expert_keys import checked
from vnext.models.config.json_keys import Json, flag, positive, refuse, usual
from vnext.models.config.layer_kinds import Heads, LayerInputs
from vnext.models.config.model_config import DecoderForm, Experts, ModelConfig, layer_windows, text_part, without_windows
from vnext.models.config.rope_config import two_ropes
from vnext.models.errors import ModelError
from vnext.models.families.gemma2 import BOTH_SIDES, WEIGHT_AXES as GEMMA2_AXES, gemma_config
from vnext.models.layers import fused
from vnext.models.layers.assembly import ExpertNames, Source, attention, gated_mlp, linear, sparse_mlp, wide_norm
from vnext.models.layers.decoder import Names, Params, assemble_decoder
from vnext.models.layers.decoder_params import LayerParams
from vnext.models.layers.layer_inputs import Added, Beside, InputTable, Narrow
from vnext.models.layers.layers import Attention, GatedMlp, ReadingAttention
from vnext.models.layers.sharding import AnyAxis, Axis, Layout, LayoutTable, Sized

DEFAULTS = usual(
    vocab_size=262144, num_attention_heads=8, num_key_value_heads=4, head_dim=256, sliding_window=512,
    max_position_embeddings=131072, tie_word_embeddings=True, query_pre_attn_scalar=1, eos_token_id=1,
    hidden_size_per_layer_input=256, vocab_size_per_layer_input=262144, bos_token_id=2,
)  # fmt: skip
ROPES = usual(
    full_attention={"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
    sliding_attention={"rope_type": "default", "rope_theta": 1e4},
)  # fmt: skip
UNIFIED = usual(hidden_size_per_layer_input=0, enable_moe_block=False, sliding_window=1024, max_position_embeddings=262144)
"""What Gemma 4 12B assumes, which has neither inputs by layer nor experts."""
GLOBAL_HEAD_DIM = 512
ROOTS = ("model.", "model.language_model.")
SLIDING, WHOLE = "sliding_attention", "full_attention"
ROUTER = ExpertNames(router="router.proj")


def parse(raw: Json, generation: Json) -> ModelConfig:
    """The configuration; a multimodal model has that of its language part in text_config. Raises ModelError."""
    if "text_config" in raw:
        raw = text_part(raw)
    refuse(raw, "attention_bias", unless=(False,))
    raw = DEFAULTS | (UNIFIED if "Unified" in raw["architectures"][0] else {}) | raw
    if raw.get("use_bidirectional_attention") == "vision":
        raw = raw | {"use_bidirectional_attention": None}
    count = positive(raw, "num_hidden_layers")
    kinds = list(raw.get("layer_types") or (WHOLE if (layer + 1) % 6 == 0 else SLIDING for layer in range(count)))
    kinds[-1:] = [WHOLE]  # as transformers has it
    raw = raw | {"layer_types": kinds, "rope_parameters": raw.get("rope_parameters") or dict(ROPES)}
    size, known = raw["hidden_size_per_layer_input"], positive(raw, "vocab_size_per_layer_input")
    heads = whole_heads(raw, kinds)
    rope, local_rope = two_ropes(raw, positive(raw, "head_dim"), 1e6, 1e4)
    sources = cache_layers(kinds, raw.get("num_kv_shared_layers") or 0)
    wide, narrow = 2 * positive(raw, "intermediate_size"), positive(raw, "intermediate_size")
    is_wide = flag(raw, "use_double_wide_mlp") and bool(sources)
    return gemma_config(
        raw,
        generation,
        windows=layer_windows(raw, kinds),
        rope=rope,
        local_rope=local_rope,
        form=DecoderForm(norms_values=True),
        whole_heads=heads if (heads.kv_head_count, heads.head_dim) != (raw["num_key_value_heads"], raw["head_dim"]) else None,
        cache_layers=sources,
        mlp_sizes=tuple(narrow if source == layer else wide for layer, source in enumerate(sources)) if is_wide else (),
        layer_inputs=LayerInputs(size=size, vocab_size=known) if size else None,
        experts=experts(raw) if flag(raw, "enable_moe_block") else None,
    )


def whole_heads(raw: Json, kinds: Sequence[str]) -> Heads:
    """The heads of layers without a window: by keys of their own, or by layer. Raises ModelError."""
    by_layer = {int(layer): own for layer, own in (raw.get("per_layer_config") or {}).items()}
    whole = [by_layer.get(layer, {}) for layer, kind in enumerate(kinds) if kind == WHOLE]
    if by_layer and (any(own != whole[0] for own in whole) or len(by_layer) > len(whole)):
        raise ModelError("per_layer_config must say the same for each layer of full_attention and nothing for others")
    usual = {"head_dim": raw.get("global_head_dim", GLOBAL_HEAD_DIM)}
    if flag(raw, "attention_k_eq_v") and raw.get("num_global_key_value_heads"):
        usual["num_key_value_heads"] = raw["num_global_key_value_heads"]
    own = usual | whole[0]
    return Heads(kv_head_count=positive(raw | own, "num_key_value_heads"), head_dim=positive(own, "head_dim"))


def cache_layers(kinds: Sequence[str], shared: int) -> tuple[int, ...]:
    """Per layer whose cache it reads: the last `shared` ones that of the last layer before them of their kind; () where none is
    shared. Raises ModelError."""
    if not shared:
        return ()
    first = len(kinds) - shared
    own = {kind: layer for layer, kind in enumerate(kinds[: max(0, first)])}
    if not set(kinds) <= own.keys():
        raise ModelError(f"num_kv_shared_layers {shared} leaves no layer of each kind with a cache; correct config.json")
    return tuple(layer if layer < first else own[kind] for layer, kind in enumerate(kinds))


def experts(raw: Json) -> Experts:
    """The experts beside each MLP. Raises ModelError."""
    router = Router(positive(raw, "top_k_experts"), True)
    wide = positive(raw, "moe_intermediate_size")
    return checked(Experts(count=positive(raw, "num_experts"), intermediate_size=wide, router=router))


def WEIGHT_AXES(config: ModelConfig) -> LayoutTable:  # noqa: N802  # a field of Family
    """The layouts of all names, and of those of layers with other heads or wider MLPs by their whole names."""
    unlike = {root + name: layout for root in ROOTS for name, layout in unlike_axes(config)}
    return {**GEMMA2_AXES, **input_axes(config), **unlike} | {
        "router.proj": Layout((Axis.EXPERTS,), Axis.HIDDEN),
        "scale": Layout((Axis.HIDDEN,)),
        "per_expert_scale": Layout((Axis.EXPERTS,)),
        "layer_scalar": Layout((Axis.ONE,)),
        **{f"{norm}_layernorm_{at}": Layout((Axis.HIDDEN,)) for norm in ("pre_feedforward", "post_feedforward") for at in (1, 2)},
    }


def input_axes(config: ModelConfig) -> dict[str, Layout]:
    """The layouts of what tokens give to each layer."""
    inputs = config.layer_inputs
    if inputs is None:
        return {}
    own, joined = Sized(inputs.size), Sized(inputs.size * config.layer_count)
    return {
        "embed_tokens_per_layer": Layout((Sized(inputs.vocab_size, is_split=True),), joined),
        "per_layer_model_projection": Layout((joined,), Axis.HIDDEN),
        "per_layer_projection_norm": Layout((own,)),
        "per_layer_input_gate": Layout((own,), Axis.HIDDEN),
        "per_layer_projection": Layout((Axis.HIDDEN,), own),
        "post_per_layer_input_norm": Layout((Axis.HIDDEN,)),
    }


def unlike_axes(config: ModelConfig) -> Iterator[tuple[str, Layout]]:
    """The layouts of what differs from layer to layer, by name without the root."""
    whole = without_windows(config)
    keys = Sized(whole.kv_head_count * whole.head_dim, is_split=True, unit=whole.head_dim)
    heads: AnyAxis = Sized(whole.head_count * whole.head_dim, is_split=True)
    for layer, window in enumerate(config.windows):
        here = f"layers.{layer}."
        if whole is not config and not window:
            outputs = {"q_proj": heads, "k_proj": keys, "v_proj": keys}
            yield from ((f"{here}self_attn.{name}.weight", Layout((axis,), Axis.HIDDEN)) for name, axis in outputs.items())
            yield f"{here}self_attn.o_proj.weight", Layout((Axis.HIDDEN,), heads)
            yield from ((f"{here}self_attn.{name}_norm.weight", Layout((Sized(whole.head_dim),))) for name in "qk")
        if config.mlp_sizes:
            wide = Sized(config.mlp_sizes[layer], is_split=True)
            yield from ((f"{here}mlp.{name}_proj.weight", Layout((wide,), Axis.HIDDEN)) for name in ("gate", "up"))
            yield f"{here}mlp.down_proj.weight", Layout((Axis.HIDDEN,), wide)


def assemble(source: Source, config: ModelConfig) -> Params:
    """The parameters, wherever this checkpoint keeps its language part."""
    return assemble_below(root_of(source), source, config, lambda prefix, _: gated_mlp(source, prefix), with_own)


def root_of(source: Source) -> str:
    """Below which this checkpoint keeps its language part."""
    return next((root for root in ROOTS if root + "norm.weight" in source), ROOTS[0])


def assemble_below(
    root: str, source: Source, config: ModelConfig, mlp: Callable[[str, int], GatedMlp],
    with_more: Callable[[LayerParams, Source, ModelConfig, str], LayerParams],
) -> Params:  # fmt: skip
    """The parameters below `root`, with the MLP of each layer by its prefix and number, and what `with_more` adds to a layer."""
    names = BOTH_SIDES._replace(root=root)
    found = assemble_decoder(
        source, config, lambda prefix, at: (any_attention(source, config, prefix, at), mlp(prefix, at)), names, wide_norm
    )
    layers = tuple(with_more(layer, source, config, f"{root}layers.{at}.") for at, layer in enumerate(found.layers))
    return found._replace(
        embedding_scale=rounded(source, config.hidden_size**0.5),
        layers=layers,
        stack=fused.describe(layers, config),
        inputs=input_table(source, config, names) if config.layer_inputs else None,
    )


def rounded(source: Source, scale: float) -> float:
    """What multiplies an embedding, in the model's dtype."""
    return float(source.dtype.type(scale))


def any_attention(source: Source, config: ModelConfig, prefix: str, index: int) -> Attention | ReadingAttention:
    """The attention of a layer: with a cache of its own or reading another's; keys stand in for values that are not there."""
    here = prefix + "self_attn."
    query_norm = wide_norm(source, here + "q_norm")
    if config.cache_layers and config.cache_layers[index] != index:
        return ReadingAttention(linear(source, here, "q_proj"), linear(source, here, "o_proj"), query_norm)
    if here + "v_proj.weight" in source:
        plain = attention(source, prefix)
    else:
        plain = Attention(linear(source, here, "q_proj", "k_proj", "k_proj"), linear(source, here, "o_proj"))
    return plain._replace(q_norm=query_norm, k_norm=wide_norm(source, here + "k_norm"), v_norm=query_norm * 0 + 1)


def with_own(layer: LayerParams, source: Source, config: ModelConfig, prefix: str) -> LayerParams:
    """The layer with what it adds behind its MLP and the experts beside it."""
    has_scale = prefix + "layer_scalar" in source
    scale = source.fused((prefix + "layer_scalar",)) if has_scale else None
    narrow = narrow_gate(source, prefix) if config.layer_inputs else None
    beside = experts_beside(source, config, prefix) if config.experts else None
    return layer._replace(added=Added(narrow, scale) if has_scale or narrow else None, beside=beside)


def narrow_gate(source: Source, prefix: str) -> Narrow:
    """How a layer takes its own inputs."""
    gate, projection = (linear(source, prefix, name) for name in ("per_layer_input_gate", "per_layer_projection"))
    return Narrow(gate, projection, wide_norm(source, prefix + "post_per_layer_input_norm"))


def experts_beside(source: Source, config: ModelConfig, prefix: str) -> Beside:
    """The experts of a layer, whose router reads the stream normed and scaled."""
    scales = source.wide(prefix + "router.per_expert_scale")
    return Beside(
        sparse_mlp(source, config, prefix, ROUTER)._replace(share_scales=scales),
        router_norm=source.wide(prefix + "router.scale") * config.hidden_size**-0.5,
        norm=wide_norm(source, prefix + "pre_feedforward_layernorm_2"),
        after_mlp=wide_norm(source, prefix + "post_feedforward_layernorm_1"),
        after_experts=wide_norm(source, prefix + "post_feedforward_layernorm_2"),
    )


def input_table(source: Source, config: ModelConfig, names: Names) -> InputTable:
    """What tokens give to each layer."""
    assert config.layer_inputs is not None
    return InputTable(
        table=source.table(names.root + "embed_tokens_per_layer.weight"),
        known=config.layer_inputs.vocab_size,
        scale=rounded(source, config.layer_inputs.size**0.5),
        projection=source.packed((names.root + "per_layer_model_projection.weight",)),
        projection_scale=config.hidden_size**-0.5,
        norm=wide_norm(source, names.root + "per_layer_projection_norm"),
    )
