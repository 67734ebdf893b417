"""What of a checkpoint bears on answers, perhaps, and is not read: tensors, members of its configurations, templates.

Asks the family itself: its configuration is parsed, and its parameters are put together from names alone (recording.py).
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from vnext.base.tokenizer_files import template_names
from vnext.models.config.folder import is_dummy, read_config
from vnext.models.config.json_keys import Json, Watched, read_optional_json
from vnext.models.config.model_config import ModelConfig, load_config, parse_config
from vnext.models.config.tower_config import THEIRS
from vnext.models.gguf.folder import linked_files
from vnext.models.loading.checkpoint import ROOT, Checkpoint, open_checkpoint
from vnext.models.loading.gguf_tensors import unread_gguf
from vnext.models.loading.recording import Recording
from vnext.models.registry import family, sound_parts, tower_parts

SHOWN = 4
HARMLESS_TENSORS = re.compile(
    r"rotary_emb\.inv_freq$|\b(attn|attention)\.((masked_)?bias|causal_mask)$|\bact_fn\.(beta|eps)$|"
    r"\b(vision|audio)_tower\.|\bvision_(adapter|embedder|projection)\.|\bembed_(vision|audio)\.|\bvisual\.|"
    r"^model\.(vision_model|connector|encoder)\.|"
    r"\bmulti_modal_projector\.|\bimage_newline$|\bmtp_layers\.|^(model\.)?mtp\.|^(talker|token2wav)\.|"
    r"\bself_attn\.((query|key|diagonal)_decay|slope_rate)$|"
    r"\bembeddings\.position_ids$|\bpooler\.dense\.(weight|bias)$|"
    r"\b_weight_act_quant_\w+$|^model\.layers\.0\.post_mlp_layernorm\.weight$|"
    r"\.((input|output)_(global_)?scale|[qkv]_scale|weight_shape|(weight_)?g_idx|weight_format|weight\.quant_state\.\w+)$"
)
"""Computed anew, or of what is not served: images, voices, layers that draft, what only BERT's training needs; scales of
activations, which are not rounded here; what formats of weights ask for once; a norm that the dense layer of A.X K1 has and does
not use."""
OF_DECODERS = re.compile(r"\b(language_model|text_model|lm_head)\.")
"""Of models whose towers transformers reads."""
HARMLESS = frozenset(
    """
    audio_config audio_end_token_id audio_start_token_id audio_token_id audio_token_index
    boa_token_id boi_token_id eoa_token_id eoa_token_index eoi_token_id
    _attn_implementation _attn_implementation_autoset _name_or_path _sliding_window_pattern activation_dropout
    add_cross_attention architectures attention_dropout attention_probs_dropout_prob attn_implementation attn_pdrop auto_map
    begin_suppress_tokens hidden_dropout_prob
    block_dim block_mlp_init_scale block_norm_eps block_out_init_scale block_use_swiglu block_use_xavier_init boi_token_index
    bos_token_id cache_implementation chunk_size_feed_forward classifier_dropout conv_dim conv_dim_out conv_use_xavier_init
    cross_attention_hidden_size decoder_start_token_id do_sample dtype embd_pdrop embedding_dropout eod_token_id
    eoi_token_index eos_token_id experts_per_token finetuning_task forced_bos_token_id forced_eos_token_id hidden_dropout id2label
    image_grid_pinpoints video_token_index
    image_token_id image_token_index init_method initial_context_length initializer_factor initializer_range is_decoder
    is_encoder_decoder is_llama_config label2id mamba_chunk_size mamba_ssm_dtype mm_tokens_per_image model_type n_ctx
    normalization_function num_heads num_labels original_max_position_embeddings output_attentions output_hidden_states
    output_router_logits output_scores pad_token_id prefix pretraining_tp problem_type remove_invalid_values
    reorder_and_upcast_attn resid_pdrop residual_dropout return_dict return_dict_in_generate router_aux_loss_coef
    router_jitter_noise sep_token_id summary_activation summary_first_dropout summary_proj_to_labels summary_type
    summary_use_proj task_specific_params text_config tokenizer_class torch_dtype torchscript transformers.js_config
    transformers_version unk_token_id unsloth_fixed unsloth_version use_cache use_pos_enc use_qk_norm video_token_id
    vision_config vision_end_token_id vision_start_token_id
    block_size linear_a_log_max linear_a_log_min linear_dt_init_floor linear_dt_max linear_dt_min mtp_loss_scaling_factor
    position_id_per_seconds seconds_per_chunk user_token_id enable_audio_output enable_talker talker_config token2wav_config
    block_multiple_of mamba_ssm_cache_dtype shared_moe_mode use_associative_scan use_expert_bias use_mambapy
    classifier_activation classifier_bias classifier_pooling cls_token_id decoder_bias deterministic_flash_attn
    chunk_size expand mamba_use_mlp mlp_expansion_factor num_logits_to_keep rescale_prenorm_residual kv_channels num_query_groups
    use_mem_eff_path
    time_step_floor time_step_init_scheme time_step_max time_step_min time_step_rank use_mamba_kernels
    initializer_cutoff_factor mlp_dropout norm_bias sparse_pred_ignore_index sparse_prediction
    aux_loss_alpha embedding_initializer_range ep_size final_w_init_variance_scale w_init_variance_scale qk_head_dim seq_aux
    apply_spec_augment classifier_proj_size decoder_layerdrop encoder_layerdrop init_std mask_feature_length
    mask_feature_min_masks mask_feature_prob mask_time_length mask_time_min_masks mask_time_prob median_filter_width
    d_inner d_model fused_add_norm n_layer ssm_cfg time_step_scale
    out_hidden_size projector_hidden_act projector_hidden_size
    altup_coef_clip audio_soft_tokens_per_image vision_soft_tokens_per_image
    enable_moe_fp32_combine moe_shared_expert_overlap mtp_hybrid_override_pattern mtp_layers_block_type use_post_norm
    """.split()
)
"""Members of config.json that change no answer, or that are read elsewhere."""
OF_WINDOWS = frozenset({"sliding_window", "max_window_layers", "layer_types"})
GENERATION_ONLY = frozenset(
    """
    bad_words_ids constraints encoder_no_repeat_ngram_size epsilon_cutoff eta_cutoff exponential_decay_length_penalty
    force_words_ids guidance_scale length_penalty min_length min_new_tokens no_repeat_ngram_size num_beams penalty_alpha
    sequence_bias stop_strings suppress_tokens typical_p
    """.split()
)
"""Members of generation_config.json that change answers elsewhere and are not read here."""
NEUTRAL: tuple[object, ...] = (None, False, 0, 1, "", [], {})
USED_TEMPLATES = frozenset({"default", "tool_use"})


def unread(path: Path) -> str:
    """One sentence on what is left unread of the checkpoint in folder `path`, "" where there is nothing. Raises ModelError."""
    config = load_config(path)
    only = GENERATION_ONLY - ({"suppress_tokens"} if config.sound and config.sound.leads else set())
    parts = {
        "tensors": unread_tensors(path, config),
        "members of config.json": unread_members(read_config(path)),
        "members of generation_config.json": _set(read_optional_json(path / "generation_config.json"), only),
        "chat templates": sorted(template_names(path) - USED_TEMPLATES),
    }
    found = [f"{what} {_shown(names)}" for what, names in parts.items() if names]
    if not found:
        return ""
    return f"Of the checkpoint in {path} some is not read, though elsewhere answers may depend on it: {'; '.join(found)}."


def unread_tensors(path: Path, config: ModelConfig) -> list[str]:
    """Tensors that the model does not take, by their names in the files."""
    if linked_files(path):
        return unread_gguf(path)
    with open_checkpoint(path) as own:
        stored = own.rooted()
        source = Recording(lambda name: name in stored or stored.format_of(name) is not None)
        family(config.architecture).assemble(source, config)
        source.read.update(name for each in (config.pooling.layers if config.pooling else ()) for name in each.tensors)
        formats = {name: format for name in source.read if (format := stored.format_of(name)) is not None}
        read = source.read.union(*(format.tensors(name) for name, format in formats.items()))
        drafting = f"{ROOT}layers.{config.layer_count}." if config.mtp_layers == 1 else "/"
        ours = OF_DECODERS.search if is_theirs(config) else bool
        left = [name for name in stored.names() if name not in read and ours(name) and not HARMLESS_TENSORS.search(name)]
        reading = [layer for layer, source in enumerate(config.cache_layers) if source != layer]
        idle = tuple(f"layers.{layer}.self_attn.{part}_" for layer in reading for part in "kv")  # transformers ignores them too
        if (experts := config.experts) is not None:
            idle += tuple(f".experts.{experts.count + number}." for number in range(experts.idle))
        left = [name for name in left if not name.startswith(drafting) and not any(part in name for part in idle)]
        return sorted(name if name in own else name.partition(".")[2] for name in left)


def has_tower(path: Path, config: ModelConfig) -> bool:
    """Whether a checkpoint has any tensor of the tower that its configuration describes: copies for texts alone have none."""
    if is_dummy(path) and is_theirs(config):
        return False  # their numbers are in files alone
    if (config.tower is None and config.sound is None) or is_dummy(path):
        return config.tower is not None or config.sound is not None
    with open_checkpoint(path) as own:
        return bool(tower_tensors(own.rooted(), config))


def is_theirs(config: ModelConfig) -> bool:
    """Whether transformers computes the tower."""
    return config.tower is not None and config.tower.form in THEIRS


def tower_tensors(stored: Checkpoint, config: ModelConfig) -> list[str]:
    """Those of a checkpoint that the tower takes which its configuration describes."""
    source = Recording(lambda name: name in stored)
    if is_theirs(config):
        family(config.architecture).assemble(source, config)
        return [name for name in stored.names() if name not in source.read and not OF_DECODERS.search(name)]
    for parts in (tower_parts(config.architecture), sound_parts(config.architecture)):
        parts.assemble(source, parts.config(config))
    return [name for name in sorted(source.read) if name in stored]


def unread_members(raw: Json) -> list[str]:
    """Members of a config.json, its language part's too, that the family does not ask for and that are not known to be harmless."""
    watched = Watched(raw)
    parse_config(watched, {})
    text = raw.get("text_config")
    members = raw | (text if isinstance(text, dict) else {})
    harmless = HARMLESS | watched.asked
    if members.get("use_sliding_window") is False:
        harmless |= OF_WINDOWS
    elif "sliding_attention" not in (members.get("layer_types") or ()):
        harmless |= {"layer_types"}
    if not {"linear_attention", "mamba"}.intersection(members.get("layer_types") or members.get("layers_block_type") or ()):
        harmless |= {name for name in members if name.startswith("mamba_")} | {"time_step_limit"}
    if members.get("num_local_experts") == 0:
        harmless |= {"num_experts_per_tok"}
    return _set(members, members.keys() - harmless)


def _set(members: Json, names: Iterable[str]) -> list[str]:
    """Those of the names whose members say something."""
    return sorted(name for name in names if (value := members.get(name)) is True or value not in NEUTRAL)


def _shown(names: list[str]) -> str:
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return f"{', '.join(names[:SHOWN])}{more}"
