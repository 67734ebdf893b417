"""Nemotron H and 3: layers are Mamba-2, attention, MLPs or experts.

Steps have no lower bound, as in their authors' own code; transformers has one of 0.001 for whole prompts alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from msgspec.structs import replace

from vnext.models.config.expert_keys import sigmoid_experts
from vnext.models.config.json_keys import Json, flag, number, positive, refuse, shown, usual
from vnext.models.config.mamba_config import mamba_layers
from vnext.models.config.model_config import PLAIN_ACTIVATIONS, Experts, ModelConfig, activation, common_config
from vnext.models.errors import ModelError
from vnext.models.layers.assembly import ExpertNames, Source, linear, plain_mlp, sparse_mlp, wide_norm
from vnext.models.layers.decoder import Mixing, Names, Params, assemble_decoder
from vnext.models.layers.decoder_params import LayerParams
from vnext.models.layers.layers import Attention, PlainMlp, SparseMlp
from vnext.models.layers.mtp_layer import MtpParams, combine_mtp, forward_mtp
from vnext.models.layers.recurrent import assemble_mamba
from vnext.models.layers.sharding import MAMBA_AXES, Axis, Layout, Sized, matrix, shared_axes

__all__ = ["WEIGHT_AXES", "assemble", "assemble_mtp", "combine_mtp", "forward_mtp", "parse"]

OWN_AXES = MappingProxyType(
    {
        **shared_axes("shared_experts"),
        **{name.replace("mamba", "mixer"): layout for name, layout in MAMBA_AXES.items()},
        "embeddings": matrix(Axis.VOCAB, Axis.HIDDEN),
        **dict.fromkeys(("norm_f", "enorm", "hnorm", "final_layernorm"), Layout((Axis.HIDDEN,))),
        "eh_proj": matrix(Axis.HIDDEN, Axis.TWICE_HIDDEN),
    }
)
MAMBA, ATTENDING, PLAIN, SPARSE = OWN = ("linear_attention", "full_attention", "mlp", "moe")
KINDS = MappingProxyType(
    {"M": MAMBA, "*": ATTENDING, "-": PLAIN, "E": SPARSE, "mamba": MAMBA, "attention": ATTENDING} | dict(zip(OWN, OWN))
)
"""What a layer is, by the names that configurations have for it."""
DEFAULTS = usual(
    num_key_value_heads=8, head_dim=128, max_position_embeddings=4096, intermediate_size=21504, layer_norm_epsilon=1e-5,
    mlp_hidden_act="relu2", mamba_num_heads=128, mamba_head_dim=64, ssm_state_size=128, n_groups=8, conv_kernel=4,
    use_conv_bias=True, n_routed_experts=8, num_experts_per_tok=2, norm_topk_prob=True, moe_intermediate_size=7688,
    moe_shared_expert_intermediate_size=7688,
)  # fmt: skip
EXPERTS = ExpertNames(gate_up=("up_proj",), bias="gate.e_score_correction_bias")
ROOTS = ("backbone.", "model.")
COUNT = "num_nextn_predict_layers"


def WEIGHT_AXES(config: ModelConfig) -> Mapping[str, Layout]:  # noqa: N802  (a field of Family)
    """The layouts. Experts may read and give what a product makes narrow."""
    if config.experts is None or not config.experts.input_size:
        return OWN_AXES
    narrow = Sized(config.experts.input_size)
    return {
        **OWN_AXES,
        "experts.up_proj": Layout((Axis.EXPERT_MLP,), narrow),
        "experts.down_proj": Layout((narrow,), Axis.EXPERT_MLP),
        "fc1_latent_proj": Layout((narrow,), Axis.HIDDEN),
        "fc2_latent_proj": Layout((Axis.HIDDEN,), narrow),
    }


def parse(raw: Json, generation: Json) -> ModelConfig:
    raw = raw | {key: value for key, value in DEFAULTS.items() if raw.get(key) is None}
    for key in ("use_bias", "residual_in_fp32", "sliding_window"):
        refuse(raw, key, unless=(False,))
    refuse(raw, "mamba_hidden_act", unless=("silu",))
    kinds = layer_kinds(raw)
    turnless = tuple(layer for layer, kind in enumerate(kinds) if kind == ATTENDING)
    idle = tuple(layer for layer, kind in enumerate(kinds) if kind in (PLAIN, SPARSE))
    inner = positive(raw, "mamba_num_heads") * positive(raw, "mamba_head_dim")
    named = {
        "num_hidden_layers": len(kinds),
        "rms_norm_eps": number(raw, "layer_norm_epsilon"),
        "mamba_d_ssm": inner,
        "mamba_n_heads": raw["mamba_num_heads"],
        "mamba_d_head": raw["mamba_head_dim"],
        "mamba_n_groups": raw["n_groups"],
        "mamba_d_state": raw["ssm_state_size"],
        "mamba_d_conv": raw["conv_kernel"],
        "mamba_conv_bias": flag(raw, "use_conv_bias"),
    }
    recurrent = mamba_layers(raw | named, (*turnless, *idle))
    return common_config(
        raw | named,
        generation,
        activation=activation(raw, "mlp_hidden_act", PLAIN_ACTIVATIONS),
        experts=own_experts(raw, kinds) if SPARSE in kinds else None,
        recurrent=recurrent and replace(recurrent, idle=idle),
        still_layers=turnless,
        mtp_layers=drafting_layers(raw) if SPARSE in kinds else 0,
    )


def drafting_layers(raw: Json) -> int:
    """How many pairs of layers draft; 0 where they are not one that attends and one with experts. Raises ModelError."""
    given = raw.get("mtp_layers_block_type") or list(raw.get("mtp_hybrid_override_pattern") or "*E")
    if [KINDS.get(each) for each in given] != [ATTENDING, SPARSE] or not raw.get(COUNT):
        return 0
    return positive(raw, COUNT)


def own_experts(raw: Json, kinds: list[str]) -> Experts:
    """The experts of the layers that are such. Raises ModelError."""
    found = sigmoid_experts(raw, tuple(layer for layer, kind in enumerate(kinds) if kind != SPARSE))
    narrow = 0 if raw.get("moe_latent_size") is None else positive(raw, "moe_latent_size")
    return replace(found, shared_size=positive(raw, "moe_shared_expert_intermediate_size"), input_size=narrow)


def layer_kinds(raw: Json) -> list[str]:
    """What each layer is: by a word a layer, or by a sign. Raises ModelError."""
    given = raw.get("layers_block_type") or raw.get("layer_types") or list(raw.get("hybrid_override_pattern") or "")
    kinds = [KINDS.get(each, "") for each in given]
    if not all(kinds) or not {MAMBA, ATTENDING} <= set(kinds):
        raise ModelError(
            "layers_block_type must name linear_attention, full_attention, mlp or moe for each layer, each of the first two at "
            f"least once, but is {shown(given)}; correct config.json"
        )
    return kinds


def attending(source: Source, config: ModelConfig, here: str) -> Attention:
    bias = config.attention_bias
    return Attention(linear(source, here, "q_proj", "k_proj", "v_proj", bias=bias), linear(source, here, "o_proj", bias=bias))


def sparse(source: Source, config: ModelConfig, here: str) -> SparseMlp:
    shared = plain_mlp(source, here + "shared_experts.", "up_proj", "down_proj", bias=config.mlp_bias)
    found = sparse_mlp(source, config, here, EXPERTS)._replace(shared=shared)
    if config.experts is None or not config.experts.input_size:
        return found
    narrow, wide = (linear(source, here, f"fc{part}_latent_proj", bias=config.mlp_bias) for part in (1, 2))
    return found._replace(narrow=(narrow, wide))


def assemble(source: Source, config: ModelConfig) -> Params:
    assert config.recurrent is not None
    recurrent = config.recurrent

    def parts(prefix: str, index: int) -> tuple[Mixing | None, PlainMlp | SparseMlp | None]:
        here = prefix + "mixer."
        if config.experts and index not in config.experts.dense_layers:
            return None, sparse(source, config, here)
        if index in recurrent.idle:
            return None, plain_mlp(source, here, "up_proj", "down_proj", bias=config.mlp_bias)
        return assemble_mamba(source, config, here) if index in recurrent.layers else attending(source, config, here), None

    names = Names(root=root_of(source), embedding="embeddings", norm="norm_f", attention_norm="norm", mlp_norm="")
    return assemble_decoder(source, config, parts, names, wide_norm)


def root_of(source: Source) -> str:
    return next((root for root in ROOTS if root + "norm_f.weight" in source), ROOTS[0])


def assemble_mtp(source: Source, config: ModelConfig) -> MtpParams:
    """The parameters of the two layers that draft together: one attends, one has experts. Raises ModelError."""
    first, second = "mtp.layers.0.", "mtp.layers.1."
    if first + "eh_proj.weight" not in source:
        raise ModelError("the checkpoint has no tensors mtp.*, which method mtp needs: take another method")
    return MtpParams(
        last_norm=wide_norm(source, root_of(source) + "norm_f"),
        embedding_norm=wide_norm(source, first + "enorm"),
        state_norm=wide_norm(source, first + "hnorm"),
        project=source.packed((first + "eh_proj.weight",)),
        layer=LayerParams(
            wide_norm(source, first + "norm"), attending(source, config, first + "mixer."),
            wide_norm(source, second + "norm"), sparse(source, config, second + "mixer."),
        ),
        norm=wide_norm(source, second + "final_layernorm"),
        frequencies=None,
    )  # fmt: skip
