"""Zamba2: Mamba-2, shared blocks.

A block of attention and MLP reads a layer's input beside the embedding, and the layer's Mamba-2 the sum of that input and what the
block gives. What each layer adds to the block's products is narrow. Steps have no lower bound, as in nemotron_h.py.
"""

from __future__ import annotations

from msgspec.structs import replace

from vnext.models.config.json_keys import Json, flag, positive, refuse, shown, usual
from vnext.models.config.layer_kinds import SharedBlocks
from vnext.models.config.mamba_config import mamba_layers
from vnext.models.config.model_config import PLAIN_ACTIVATIONS, ModelConfig, activation, common_config
from vnext.models.errors import ModelError
from vnext.models.layers.assembly import Source, attention, linear
from vnext.models.layers.decoder import Names, Params, assemble_decoder
from vnext.models.layers.heads import NarrowPair, SharedBlock
from vnext.models.layers.recurrent import Mamba, assemble_mamba
from vnext.models.layers.sharding import MAMBA_AXES, WEIGHT_AXES as LLAMA_AXES, Axis, Layout, LayoutTable, Sized, matrix

USUAL = ["mamba"] + (["mamba"] * 5 + ["hybrid"]) * 7 + ["mamba"] * 4 + ["hybrid"] + ["mamba"] * 3 + ["hybrid"] + ["mamba"] * 2
"""The layers of a configuration that does not name them."""
KINDS = ("mamba", "linear_attention", "hybrid")
DEFAULTS = usual(
    adapter_rank=128, hidden_act="gelu", layers_block_type=USUAL, mamba_d_conv=4, mamba_d_state=64, mamba_expand=2, mamba_ngroups=1,
    max_position_embeddings=4096, n_mamba_heads=8, num_mem_blocks=1, rms_norm_eps=1e-5, tie_word_embeddings=True,
)  # fmt: skip
NORM_EPS = 1e-5
"""Of the norm of a state's groups, whatever rms_norm_eps is."""
QKV, GATE_UP = ("q", "k", "v"), "gate_up_proj_adapter_list"
PLAIN = Names(norm="final_layernorm", mlp_norm="")
HYBRID = PLAIN._replace(attention_norm="mamba_decoder.input_layernorm")


def WEIGHT_AXES(config: ModelConfig) -> LayoutTable:  # noqa: N802  (a field of Family)
    """The layouts; those of narrow products, which have numbers alone, by their whole names."""
    blocks, twice = blocks_of(config), Axis.TWICE_HIDDEN
    rank, wide = Sized(blocks.rank), {"q": Axis.HEADS, "k": Axis.KV_HEADS, "v": Axis.KV_HEADS}
    found = {
        **LLAMA_AXES,
        **MAMBA_AXES,
        **{f"{part}_proj": matrix(axis, twice) for part, axis in wide.items()},
        "shared_transformer.input_layernorm": Layout((twice,)),
        **dict.fromkeys(("pre_ff_layernorm", "final_layernorm"), Layout((Axis.HIDDEN,))),
        "gate_up_proj": matrix((Axis.MLP, Axis.MLP), Axis.HIDDEN),
        "linear": matrix(Axis.HIDDEN, Axis.HIDDEN),
    }
    for at in range(len(blocks.layers)):
        here = block_prefix(blocks, at)
        pairs = {f"{here}self_attn.linear_{part}_adapter_list.{at}.": (twice, axis) for part, axis in wide.items()}
        for name, (inner, out) in {**pairs, f"{here}feed_forward.{GATE_UP}.{at}.": (Axis.HIDDEN, Axis.MLP)}.items():
            found[f"{name}0.weight"] = Layout((rank,), inner)
            found[f"{name}1.weight"] = Layout((out, out) if out is Axis.MLP else (out,), rank)
    return found


def blocks_of(config: ModelConfig) -> SharedBlocks:
    assert config.recurrent is not None and config.recurrent.blocks is not None
    return config.recurrent.blocks


def block_prefix(blocks: SharedBlocks, at: int) -> str:
    """Where a checkpoint has the block of the hybrid layer `at`: in the first of those that share it."""
    return f"model.layers.{blocks.layers[at % blocks.count]}.shared_transformer."


def parse(raw: Json, generation: Json) -> ModelConfig:
    raw = raw | {key: value for key, value in DEFAULTS.items() if raw.get(key) is None}
    for key in ("add_bias_linear", "use_long_context"):
        refuse(raw, key, unless=(False,))
    refuse(raw, "use_conv_bias", unless=(True,))
    kinds, hidden = raw["layers_block_type"], positive(raw, "hidden_size")
    if not isinstance(kinds, list) or not set(kinds) <= set(KINDS) or "hybrid" not in kinds:
        wanted = f"layers_block_type must name {' or '.join(KINDS)}, the last one once at least"
        raise ModelError(f"{wanted}, but is {shown(kinds)}; correct config.json")
    layers = tuple(layer for layer, kind in enumerate(kinds) if kind == "hybrid")
    head_dim = 2 * hidden // positive(raw, "num_attention_heads")
    follows = {"attention_head_dim": head_dim, "attention_hidden_size": 2 * hidden, "hybrid_layer_ids": list(layers)}
    for key, value in follows.items():
        refuse(raw, key, unless=(value,))
    named = {
        "head_dim": head_dim,
        "intermediate_size": positive(raw, "intermediate_size", 4 * hidden),
        "num_hidden_layers": len(kinds),
        "mamba_n_heads": raw["n_mamba_heads"],
        "mamba_n_groups": raw["mamba_ngroups"],
        "mamba_conv_bias": True,
        "mamba_d_head": raw.get("mamba_headdim"),
    }
    recurrent = mamba_layers(raw | named, ())
    assert recurrent is not None
    is_tied = flag(raw, "tie_word_embeddings")  # without it transformers shares no blocks either
    blocks = SharedBlocks(
        layers=layers,
        count=min(positive(raw, "num_mem_blocks"), len(layers)) if is_tied else len(layers),
        rank=positive(raw, "adapter_rank"),
        adds_to_attention=flag(raw, "use_shared_attention_adapter"),
    )
    return common_config(
        raw | named,
        generation,
        activation=activation(raw, "hidden_act", PLAIN_ACTIVATIONS),
        query_scale=(head_dim / 2) ** -0.5,
        recurrent=replace(recurrent, norm_eps=NORM_EPS, blocks=blocks),
        still_layers=() if flag(raw, "use_mem_rope") else layers,
    )


def assemble(source: Source, config: ModelConfig) -> Params:
    """The parameters. A block's own weights are there once."""
    blocks = blocks_of(config)
    whole = [assemble_block(source, block_prefix(blocks, at)) for at in range(blocks.count)]

    def mixing(prefix: str, index: int) -> tuple[Mamba, None]:
        return assemble_mamba(source, config, prefix + ("mamba_decoder.mamba." if index in blocks.layers else "mamba.")), None

    found = assemble_decoder(source, config, mixing, lambda index: HYBRID if index in blocks.layers else PLAIN)
    layers = list(found.layers)
    for at, index in enumerate(blocks.layers):
        here = block_prefix(blocks, at)
        names = [f"{here}self_attn.linear_{part}_adapter_list.{at}." for part in QKV]
        own = whole[at % blocks.count]._replace(
            output=linear(source, f"model.layers.{index}.", "linear"),
            beside_qkv=narrow_pair(source, *names) if blocks.adds_to_attention else None,
            beside_gate_up=narrow_pair(source, f"{here}feed_forward.{GATE_UP}.{at}."),
        )
        layers[index] = layers[index]._replace(block=own)
    return found._replace(layers=tuple(layers), stack=None)


def assemble_block(source: Source, here: str) -> SharedBlock:
    """What layers share of the block at `here`, which ends with a dot."""
    return SharedBlock(
        norm=source.fused((here + "input_layernorm.weight",)),
        attention=attention(source, here),
        mlp_norm=source.fused((here + "pre_ff_layernorm.weight",)),
        gate_up=linear(source, here, "feed_forward.gate_up_proj"),
        down=linear(source, here, "feed_forward.down_proj"),
    )


def narrow_pair(source: Source, *names: str) -> NarrowPair:
    return NarrowPair(linear(source, "", *(f"{name}0" for name in names)), tuple(linear(source, name, "1") for name in names))
