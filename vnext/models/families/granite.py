"""Granite 3, 4, 4 H, SWA, HyperCLOVA X, Bamba: multipliers, experts, Mamba-2 layers.

Models of Granite 4 have the form of the hybrid ones, and an MLP that experts share. Bamba has Granite 4's Mamba-2, no multipliers,
and heads that turn in half.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from vnext.kernels.calls import Router
from vnext.models.config.expert_keys import checked
from vnext.models.config.json_keys import Json, number, positive, shown, usual
from vnext.models.config.mamba_config import mamba_layers
from vnext.models.config.model_config import DecoderForm, Experts, ModelConfig, common_config, layer_windows
from vnext.models.config.rope_config import parse_rope, scaling_of
from vnext.models.errors import ModelError
from vnext.models.layers.assembly import ExpertNames, Source, attention, gated, gated_mlp, linear, sparse_mlp
from vnext.models.layers.decoder import Mixing, Names, Params, assemble_decoder
from vnext.models.layers.layers import Attention, GatedMlp, SparseMlp
from vnext.models.layers.recurrent import assemble_mamba
from vnext.models.layers.sharding import MAMBA_AXES, Axis, Layout, LayoutTable, Sized, matrix

OWN_AXES = MappingProxyType(
    {
        **dict.fromkeys(("router", "router.layer"), matrix(Axis.EXPERTS, Axis.HIDDEN)),
        **MAMBA_AXES,
        "pre_ff_layernorm": Layout((Axis.HIDDEN,)),
        **dict.fromkeys(("final_layernorm", "post_norm1", "post_norm2"), Layout((Axis.HIDDEN,))),
        "shared_mlp.input_linear": matrix((Axis.MLP, Axis.MLP), Axis.HIDDEN),
        "shared_mlp.output_linear": matrix(Axis.HIDDEN, Axis.MLP),
    }
)
SWA_DEFAULTS: Mapping[str, Json] = MappingProxyType(
    {
        "GraniteSWAForCausalLM": {
            "num_key_value_heads": 4, "max_position_embeddings": 8192, "rms_norm_eps": 1e-5, "tie_word_embeddings": True,
            "sliding_window": 128,
        },
        "GraniteMoeSWAForCausalLM": {"sliding_window": 128},
    }
)  # fmt: skip
"""Of models whose layers have windows, and whose heads have sinks."""
ATTENDING = ("attention", "full_attention")
HYBRID, BAMBA, DENSE = "GraniteMoeHybridForCausalLM", "BambaForCausalLM", "GraniteForCausalLM"
CLOVA = "HyperCLOVAXForCausalLM"
"""It multiplies logits by what divides those of Granite, and has norms on both sides."""
BAMBA_DEFAULTS = usual(num_key_value_heads=8, max_position_embeddings=262144, rms_norm_eps=1e-5, partial_rotary_factor=0.5)
CLOVA_NAMES = Names(after_attention_norm="post_norm1", after_mlp_norm="post_norm2")
BAMBA_NAMES = Names(mlp_norm="pre_ff_layernorm", norm="final_layernorm")


def parse(raw: Json, generation: Json) -> ModelConfig:
    if raw["architectures"][0] == BAMBA:
        return bamba_config(raw, generation)
    architecture, recurrent = raw["architectures"][0], None
    still: tuple[int, ...] = ()
    raw = SWA_DEFAULTS.get(architecture, {}) | raw
    experts = None if architecture in (DENSE, CLOVA, "GraniteSWAForCausalLM") else own_experts(raw)
    if shared := raw.get("shared_intermediate_size", 1024 if architecture == HYBRID else 0):
        raw = raw | {"intermediate_size": shared}
    if architecture == HYBRID:
        count = positive(raw, "num_hidden_layers")
        kinds = raw.get("layer_types") or raw.get("layers_block_type")
        if not isinstance(kinds, list) or len(kinds) != count or not set(kinds) & set(ATTENDING):
            raise ModelError(
                f"layer_types must name the kind of each of {count} layers, and full_attention once at least, but is "
                f"{shown(kinds)}; correct config.json"
            )
        attending = tuple(layer for layer, kind in enumerate(kinds) if kind in ATTENDING)
        still = () if raw.get("position_embedding_type") == "rope" else attending
        recurrent = mamba_layers(raw, attending)
    seen = by_window(raw) if architecture in SWA_DEFAULTS else {"still_layers": still}
    form = DecoderForm(
        embedding_scale=number(raw, "embedding_multiplier", 1.0),
        residual_scale=number(raw, "residual_multiplier", 1.0),
        logits_scale=number(raw, "logits_scaling", 1.0) ** (1 if architecture == CLOVA else -1),
        has_sinks=architecture in SWA_DEFAULTS,
    )
    usual = positive(raw, "head_dim", positive(raw, "hidden_size") // positive(raw, "num_attention_heads")) ** -0.5
    scale = number(raw, "attention_multiplier", usual if architecture == CLOVA else 1.0)
    return common_config(raw, generation, form=form, query_scale=scale, recurrent=recurrent, experts=experts, **seen)


def by_window(raw: Json) -> Json:
    """What layers see, and how they turn: by one base with a window and one without, 0 for not at all. Raises ModelError."""
    count, scaling = positive(raw, "num_hidden_layers"), scaling_of(raw)
    windows = layer_windows(raw, ["sliding_attention" if layer % 4 else "full_attention" for layer in range(count)])
    head_dim = positive(raw, "head_dim", positive(raw, "hidden_size") // positive(raw, "num_attention_heads"))
    thetas = raw.get("layer_rope_theta") or [parse_rope(raw, scaling, head_dim).theta] * count
    bases = [{theta for theta, window in zip(thetas, windows) if theta and bool(window) == near} for near in (False, True)]
    if len(thetas) != count or any(len(each) > 1 for each in bases):
        raise ModelError(
            f"layer_rope_theta must have a number for each of {count} layers, one alike for those with a window and one for those "
            f"without, but is {shown(thetas)}; take --model-impl transformers"
        )
    whole, near = (parse_rope(raw, scaling | {"rope_theta": each}, head_dim) for each in (next(iter(base), 1e4) for base in bases))
    still = tuple(layer for layer, theta in enumerate(thetas) if not theta)
    local = near if near != whole and any(windows) else None
    return {"windows": windows, "still_layers": still, "rope": whole, "local_rope": local}


def WEIGHT_AXES(config: ModelConfig) -> LayoutTable:  # noqa: N802  (a field of Family)
    """The layouts. A rank has the sinks of its heads."""
    return {**OWN_AXES, "sinks": Layout((Sized(config.head_count, is_split=True),))}


def own_experts(raw: Json) -> Experts | None:
    """The experts of every layer, whose shares sum to one; None where there are none. Raises ModelError."""
    if raw.get("num_local_experts") == 0:
        return None
    router, count = Router(positive(raw, "num_experts_per_tok", 2), normalise=True), positive(raw, "num_local_experts", 8)
    return checked(Experts(count=count, intermediate_size=positive(raw, "intermediate_size"), router=router))


def bamba_config(raw: Json, generation: Json) -> ModelConfig:
    """Bamba's configuration. Raises ModelError."""
    raw = raw | {key: value for key, value in BAMBA_DEFAULTS.items() if raw.get(key) is None}
    attending = raw.get("attn_layer_indices")
    if not isinstance(attending, list) or not attending:
        raise ModelError(f"attn_layer_indices must list the layers that attend but is {shown(attending)}; correct config.json")
    return common_config(raw, generation, partial=True, recurrent=mamba_layers(raw, tuple(attending)))


def assemble(source: Source, config: ModelConfig) -> Params:
    bias, architecture = config.attention_bias, config.architecture
    recurring = config.recurrent.layers if config.recurrent else ()

    def mixing(prefix: str, index: int) -> Mixing:
        if index in recurring:
            return assemble_mamba(source, config, prefix + "mamba.")
        return attending(prefix)

    def attending(prefix: str) -> Attention:
        plain = attention(source, prefix, qkv_bias=bias, output_bias=bias)
        return plain._replace(sinks=source.wide(prefix + "self_attn.sinks")) if config.form.has_sinks else plain

    def shared(prefix: str) -> GatedMlp | None:
        here = prefix + "shared_mlp."
        if here + "input_linear.weight" in source:
            return GatedMlp(gated(source, here, "input_linear"), linear(source, here, "output_linear"))
        here = prefix + "mlp."  # as GGUF files have it
        return gated_mlp(source, here, name="shared_expert.") if here + "shared_expert.up_proj.weight" in source else None

    def widening(prefix: str) -> GatedMlp | SparseMlp:
        if config.experts:
            name = "router" if architecture in SWA_DEFAULTS else "router.layer"
            found = sparse_mlp(source, config, prefix + "block_sparse_moe.", ExpertNames(router=name))
            return found._replace(shared=shared(prefix))
        name = "feed_forward." if architecture == BAMBA else "mlp."
        return shared(prefix) or gated_mlp(source, prefix, bias=config.mlp_bias, name=name)

    behind = CLOVA_NAMES if "model.layers.0.post_norm1.weight" in source else Names()
    names = BAMBA_NAMES if architecture == BAMBA else behind
    return assemble_decoder(source, config, lambda prefix, index: (mixing(prefix, index), widening(prefix)), names)
