"""Command R, A, Aya, Compass: attention beside MLPs, scaled logits, experts.

Three layers of four of Cohere 2 have a window, and the others no positions. With experts the first layers may have none. Compass
has a rope, or none, for each kind of layers, and heads that turn by halves.
"""

from __future__ import annotations

from msgspec.structs import replace

from vnext.kernels.calls import Router
from vnext.models.config.expert_keys import checked, dense_kinds, first_layers
from vnext.models.config.json_keys import Json, flag, number, positive, refuse, usual
from vnext.models.config.model_config import DecoderForm, Experts, ModelConfig, common_config, layer_windows
from vnext.models.config.rope_config import scaling_of, two_ropes
from vnext.models.errors import ModelError
from vnext.models.families.olmo2 import windows
from vnext.models.layers.assembly import ExpertNames, Source, any_mlp, bare_layer_norm, own_attention, rms_norm
from vnext.models.layers.decoder import Names, Params, assemble_decoder
from vnext.models.layers.sharding import shared_axes

WEIGHT_AXES = shared_axes("shared_experts")
DEFAULTS = usual(
    max_position_embeddings=8192, layer_norm_eps=1e-5, logit_scale=0.0625, tie_word_embeddings=True, sliding_window=4096,
)  # fmt: skip
COMPASS_DEFAULTS = usual(DEFAULTS, logit_scale=1.0)
MOE = "Cohere2MoeForCausalLM"
MOE_DEFAULTS = usual(num_experts=8, num_experts_per_tok=2, expert_selection_fn="softmax", norm_topk_prob=True)
FIRST = "first_k_dense_replace"
COMPASS = "CohereCompassForCausalLM"
KINDS = ("full_attention", "sliding_attention")


def parse(raw: Json, generation: Json) -> ModelConfig:
    architecture = raw["architectures"][0]
    is_second = architecture == "Cohere2ForCausalLM"
    if architecture == COMPASS:
        return _compass(COMPASS_DEFAULTS | raw, generation)
    raw = DEFAULTS | {"rope_theta": 500000.0 if architecture == "CohereForCausalLM" else 10000.0} | raw
    refuse(raw, "use_qk_norm", unless=(False,))
    if architecture == MOE:
        return _with_experts(raw, generation)
    own = windows(raw) if is_second else ()
    return common_config(
        raw | {"rms_norm_eps": number(raw, "layer_norm_eps")},
        generation,
        windows=own,
        still_layers=tuple(index for index in range(positive(raw, "num_hidden_layers")) if is_second and not own[index]),
        form=form_of(raw),
    )


def form_of(raw: Json) -> DecoderForm:
    bias = flag(raw, "attention_bias")
    return DecoderForm(is_parallel=True, turns_neighbours=True, logits_scale=number(raw, "logit_scale"), output_bias=bias)


def _with_experts(raw: Json, generation: Json) -> ModelConfig:
    raw = MOE_DEFAULTS | raw
    refuse(raw, "expert_selection_fn", unless=("softmax", "sigmoid"))
    wide, first = positive(raw, "intermediate_size"), len(first_layers(raw, FIRST))
    # Of the chosen experts alone a softmax sums to 1 already.
    by_softmax, renormed = raw["expert_selection_fn"] == "softmax", flag(raw, "norm_topk_prob")
    mean_square, plain = raw.get("rms_norm_eps"), raw.get("layer_norm_eps")
    shared = positive(raw, "num_shared_experts") if raw.get("num_shared_experts") else 0
    dense, own = dense_kinds(raw, first), _windows(raw, first)
    is_mean = bool(shared) and raw.get("shared_expert_combination_strategy", "average") == "average"
    if is_mean and dense:
        raise ModelError("shared_expert_combination_strategy average beside layers without experts is not supported")
    chosen = positive(raw, "num_experts_per_tok")
    experts = Experts(
        count=positive(raw, "num_experts"),
        intermediate_size=wide,
        router=Router(chosen, by_softmax or renormed, "softmax" if by_softmax else "sigmoid"),
        dense_layers=dense,
        shared_size=wide * shared,
    )
    early = raw.get("prefix_dense_intermediate_size")
    turning = dense if positive(raw, "prefix_dense_sliding_window_pattern", 1) == 1 else ()
    return common_config(
        raw | {"rms_norm_eps": mean_square or plain, "intermediate_size": early or wide},
        generation,
        windows=own,
        still_layers=tuple(at for at, window in enumerate(own) if not window and at not in turning),
        form=replace(form_of(raw), mlp_scales=(1.0, 0.5) if is_mean else None, mean_square=mean_square is not None),
        experts=checked(experts),
    )


def _compass(raw: Json, generation: Json) -> ModelConfig:
    raw = raw | {"rms_norm_eps": number(raw, "layer_norm_eps"), "logit_scale": number(raw, "logit_scale", 1.0)}
    own, ropes = layer_windows(raw, ["full_attention"] * positive(raw, "num_hidden_layers")), ropes_of(raw)
    head_dim, theta = positive(raw, "hidden_size") // positive(raw, "num_attention_heads"), number(raw, "rope_theta", 10000.0)
    rope, local = two_ropes(raw | {"rope_parameters": ropes}, head_dim, theta, theta)
    return common_config(
        raw | {"head_dim": head_dim},
        generation,
        windows=own,
        rope=rope,
        local_rope=local if any(own) and local != rope else None,
        still_layers=tuple(at for at, window in enumerate(own) if ropes.get(KINDS[window > 0]) is None),
        form=replace(form_of(raw), turns_neighbours=False),
    )


def ropes_of(raw: Json) -> Json:
    """The rope of each kind of layers, None for none."""
    scaling = scaling_of(raw)
    return scaling if scaling.keys() & set(KINDS) else dict.fromkeys(KINDS, scaling)


def _windows(raw: Json, first: int) -> tuple[int, ...]:
    """Of every n-th layer none, counted anew behind the first ones; or those that layer_types names."""
    early, late = positive(raw, "prefix_dense_sliding_window_pattern", 1), positive(raw, "sliding_window_pattern", 4)
    layers = range(positive(raw, "num_hidden_layers"))
    have = [(at + 1) % early if at < first else (at - first + 1) % late for at in layers]
    return layer_windows(raw, ["sliding_attention" if each else "full_attention" for each in have])


def assemble(source: Source, config: ModelConfig, root: str = "model.") -> Params:
    return assemble_decoder(
        source,
        config,
        lambda prefix, index: (
            own_attention(source, config, prefix), any_mlp(source, config, prefix, index, ExpertNames(shared="shared_experts"))
        ),
        Names(root=root, mlp_norm=""),
        rms_norm if config.form.mean_square else bare_layer_norm,
    )  # fmt: skip
