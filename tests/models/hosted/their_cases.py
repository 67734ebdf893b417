"""Small random models whose towers transformers computes, with their processors, as transformers makes them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, Tokenizer
from tokenizers.decoders import Fuse
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit

from vnext.media.transforms import module_of

SIDE, PATCH, VECTOR, VOCABULARY = 32, 4, 90, 99
TEXT: dict[str, Any] = dict(
    vocab_size=VOCABULARY, hidden_size=48, intermediate_size=80, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
    max_position_embeddings=2048, pad_token_id=0, bos_token_id=1, eos_token_id=2, initializer_range=0.15,
)  # fmt: skip
VISION: dict[str, Any] = dict(
    hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, image_size=SIDE, patch_size=PATCH,
    initializer_range=0.15,
)  # fmt: skip
NAVIT = {key: value for key, value in VISION.items() if key != "image_size"}
SQUARE = {"height": SIDE, "width": SIDE}
CLIP, SIGLIP = VISION | {"model_type": "clip_vision_model"}, VISION | {"model_type": "siglip_vision_model"}


class Case(NamedTuple):
    """A model of transformers: the name before `ForConditionalGeneration`, its decoder's model_type, its configuration, the words
    of its images, their first the vectors', what tokenizer and processor say of them, and the class and settings of its image
    processor."""

    name: str
    text: dict[str, Any]
    config: dict[str, Any]
    words: tuple[str, ...]
    extra: dict[str, str]
    processor: dict[str, Any]
    images: tuple[str, dict[str, Any]]
    mark: str = "<image>"


GRID = {
    "hidden_size": 64, "intermediate_size": 96, "patch_size": PATCH, "spatial_merge_size": 2, "out_hidden_size": 48,
    "initializer_range": 0.15,
}  # fmt: skip
PACKED = ("Qwen2VLImageProcessorPil", {"patch_size": PATCH, "merge_size": 2, "size": {"shortest_edge": 64, "longest_edge": 1024}})
LLAVA = {"patch_size": PATCH, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1}
CLIP_SQUARE = {"size": SQUARE, "crop_size": SQUARE}
NEXT = ("LlavaNextImageProcessorPil", {"size": {"shortest_edge": SIDE}, "crop_size": SQUARE,
        "image_grid_pinpoints": [[SIDE, 2 * SIDE], [2 * SIDE, SIDE], [2 * SIDE, 2 * SIDE]]})  # fmt: skip
TILES = ("GotOcr2ImageProcessorPil", {"size": SQUARE, "max_patches": 4, "crop_to_patches": True})
SAM = {
    "hidden_size": 16, "output_channels": 12, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 64, "patch_size": 1,
    "mlp_dim": 24, "global_attn_indexes": [1], "downsample_channels": [16, 24], "initializer_range": 0.15,
}  # fmt: skip
"""Its grid and that of pieces give the 256 and 144 queries that the model has."""
CASES = {
    "internvl": Case(
        "InternVL", TEXT | {"model_type": "qwen2"},
        {"vision_config": VISION | {"image_size": [SIDE] * 2, "patch_size": [PATCH] * 2}, "downsample_ratio": 0.5},
        ("<image>", "<img>", "</img>", "<video>"),
        {"start_image_token": "<img>", "end_image_token": "</img>", "context_image_token": "<image>", "video_token": "<video>"},
        {"processor_class": "InternVLProcessor", "image_seq_length": 16}, TILES,
    ),
    "llava": Case(
        "Llava", TEXT | {"model_type": "llama"}, {"vision_config": CLIP, "image_seq_length": 64}, ("<image>",), {}, LLAVA,
        ("CLIPImageProcessorPil", CLIP_SQUARE),
    ),
    "llava_next": Case(
        "LlavaNext", TEXT | {"model_type": "granite", "embedding_multiplier": 3.0},
        {"vision_config": CLIP, "image_grid_pinpoints": NEXT[1]["image_grid_pinpoints"]}, ("<image>",), {}, LLAVA, NEXT,
    ),
    "aya_vision": Case(
        "AyaVision", TEXT | {"model_type": "cohere2", "sliding_window": 32},
        {"vision_config": SIGLIP, "downsample_factor": 2, "vision_feature_layer": -1, "vision_feature_select_strategy": "full"},
        ("<|IMG_PATCH|>", "<image>", "<|START_OF_IMG|>", "<|END_OF_IMG|>", "TILE_GLOBAL", "TILE_1", "TILE_2"),
        {}, {"patch_size": PATCH, "img_size": SIDE, "downsample_factor": 2}, TILES,
    ),
    "idefics2": Case(
        "Idefics2", TEXT | {"model_type": "mistral", "sliding_window": None},
        {"vision_config": VISION, "perceiver_config": {
            "resampler_n_latents": 6, "resampler_depth": 1, "resampler_n_heads": 4, "num_key_value_heads": 2,
            "resampler_head_dim": 12, "hidden_size": 48}},
        ("<image>", "<fake_token_around_image>", "<end_of_utterance>"), {}, {"image_seq_len": 6},
        ("Idefics2ImageProcessorPil", {"size": {"shortest_edge": 16, "longest_edge": SIDE}, "do_image_splitting": False}),
    ),
    "ovis2": Case(
        "Ovis2", TEXT | {"model_type": "qwen2"},
        {"vision_config": {k: v for k, v in VISION.items() if k != "initializer_range"} | {"vocab_size": 40, "hidden_stride": 2},
         "visual_indicator_token_ids": [91, 92, 93, 94, 95], "vocab_size": VOCABULARY, "hidden_size": 48},
        ("<IMG_ATOM>", "<IMG_START>", "<IMG_GRID>", "<IMG_COL>", "<IMG_ROW>", "<IMG_END>", "<image>"), {}, {"image_seq_length": 16},
        ("Ovis2ImageProcessorPil", {"size": SQUARE, "max_patches": 4, "crop_to_patches": True}),
    ),
    "lighton_ocr": Case(
        "LightOnOcr", TEXT | {"model_type": "qwen3", "head_dim": 12},
        {"vision_config": VISION | {"model_type": "pixtral", "head_dim": 16}, "spatial_merge_size": 2},
        ("<image>", "<row>", "<end>"), {"image_token": "<image>", "image_break_token": "<row>", "image_end_token": "<end>"},
        {"patch_size": PATCH, "spatial_merge_size": 2}, ("PixtralImageProcessorPil", {"size": {"longest_edge": SIDE}, "patch_size": PATCH}),
    ),
    "vipllava": Case(
        "VipLlava", TEXT | {"model_type": "llama"},
        {"vision_config": CLIP, "image_seq_length": 64, "vision_feature_layers": [-2, -1]}, ("<image>",), {},
        LLAVA, ("CLIPImageProcessorPil", CLIP_SQUARE),
    ),
    "janus": Case(
        "Janus", TEXT | {"model_type": "llama"},
        {"vision_config": {
            "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "image_size": SIDE, "patch_size": PATCH,
            "projection_dim": 48, "num_image_tokens": 64, "initializer_range": 0.15},
         "vq_config": {
             "base_channels": 32, "num_embeddings": 20, "num_patches": 8, "projection_dim": 48, "image_token_embed_dim": 48,
             "channel_multiplier": [1, 1], "latent_channels": 32}},
        ("<image>", "<boi>", "<eoi>"), {"image_token": "<image>", "boi_token": "<boi>", "eoi_token": "<eoi>"}, {"num_image_tokens": 64},
        ("JanusImageProcessorPil", {"size": SQUARE, "min_size": 4}),
    ),
    "deepseek_vl": Case(
        "DeepseekVL", TEXT | {"model_type": "llama"}, {"vision_config": SIGLIP}, ("<image_placeholder>",), {"image_token": "<image_placeholder>"},
        {"num_image_tokens": 64}, ("DeepseekVLImageProcessorPil", {"size": SQUARE, "min_size": 4}),
    ),
    "lfm2_vl": Case(
        "Lfm2Vl", TEXT | {"model_type": "lfm2", "layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False},
        {"vision_config": NAVIT | {"model_type": "siglip2_vision_model", "num_patches": 64}, "projector_hidden_size": 40},
        ("<image>", "<|image_start|>", "<|image_end|>", "<|img_thumbnail|>", "<|img_row_1_col_1|>", "<|img_row_1_col_2|>", "<|img_row_2_col_1|>"),
        {"image_token": "<image>"}, {},
        ("Lfm2VlImageProcessor", {
            "encoder_patch_size": PATCH, "tile_size": SIDE, "min_image_tokens": 4, "max_image_tokens": 16, "max_tiles": 2}),
    ),
    "cohere2_vision": Case(
        "Cohere2Vision", TEXT | {"model_type": "cohere2", "sliding_window": 32},
        {"vision_config": SIGLIP, "downsample_factor": 2, "alignment_intermediate_size": 64}, ("<image>", "<boi>", "<eoi>", "<line>"),
        {"image_token": "<image>", "boi_token": "<boi>", "eoi_token": "<eoi>", "img_line_break_token": "<line>"}, {},
        ("Cohere2VisionImageProcessor", {"size": SQUARE, "patch_size": PATCH, "max_patches": 4}),
    ),
    "kimi_k25": Case(
        "Kimi_K25",
        TEXT | {
            "model_type": "deepseek_v3", "num_key_value_heads": 4, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 2,
            "topk_group": 1, "moe_intermediate_size": 32, "first_k_dense_replace": 1, "kv_lora_rank": 16, "q_lora_rank": 24,
            "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8},
        {"vision_config": NAVIT | {"pos_emb_height": 8, "pos_emb_width": 8}, "projection_hidden_size": 64},
        ("<image>",), {"image_token": "<image>"}, {},
        ("Kimi_K25ImageProcessor", {"patch_size": PATCH, "max_patches": 64}),
    ),
    "exaone4_5": Case(
        "Exaone4_5_", TEXT | {"model_type": "exaone4", "sliding_window": 32, "layer_types": ["sliding_attention", "full_attention"]},
        {"vision_config": GRID | {"depth": 2, "num_heads": 4, "num_key_value_heads": 2, "fullatt_block_indexes": [1], "window_size": 16}},
        ("<image>",), {"image_token": "<image>"}, {}, PACKED,
    ),
    "lfm3_vl": Case(
        "Lfm3Vl", TEXT | {
            "model_type": "lfm3", "head_dim": 12, "sliding_window": 40, "layer_types": ["conv", "full_attention"]},
        {"vision_config": GRID | {"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2}, "projector_hidden_size": 40},
        ("<image>", "<vis>", "</vis>"), {"image_token": "<image>", "vision_start_token": "<vis>", "vision_end_token": "</vis>"}, {}, PACKED,
    ),
    "video_llama_3": Case(
        "VideoLlama3", TEXT | {"model_type": "qwen2"}, {"vision_config": NAVIT}, ("<image>",), {"image_token": "<image>"}, {},
        ("VideoLlama3ImageProcessorPil", {"patch_size": PATCH, "merge_size": 2, "size": PACKED[1]["size"]}),
    ),
    "qwen2_vl": Case(
        "Qwen2VL", TEXT | {
            "model_type": "qwen2_vl_text", "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 2, 2]}},
        {"vision_config": {
            "depth": 2, "embed_dim": 64, "num_heads": 4, "mlp_ratio": 2, "patch_size": PATCH, "hidden_size": 48, "initializer_range": 0.15}},
        ("<image>", "<vis>", "</vis>", "<video>"), {"image_token": "<image>", "video_token": "<video>"}, {}, PACKED,
    ),
    "glm4v": Case(
        "Glm4v", TEXT | {
            "model_type": "glm4v_text", "attention_bias": True, "hidden_size": 64,
            "rope_parameters": {
                "rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5, "mrope_section": [1, 2, 1]}},
        {"vision_config": GRID | {"depth": 2, "num_heads": 4, "image_size": SIDE, "out_hidden_size": 64}},
        ("<image>", "<vis>", "</vis>", "<video>"), {"image_token": "<image>", "video_token": "<video>"}, {},
        ("Glm4vImageProcessorPil", {"patch_size": PATCH, "merge_size": 2, "size": {"shortest_edge": 256, "longest_edge": 8192}}),
    ),
    "glm4v_moe": Case(
        "Glm4vMoe", TEXT | {
            "model_type": "glm4v_moe_text", "attention_bias": True, "head_dim": 16, "n_routed_experts": 4, "num_experts_per_tok": 2,
            "moe_intermediate_size": 32, "n_shared_experts": 1, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1,
            "rope_parameters": {
                "rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5, "mrope_section": [1, 2, 1]}},
        {"vision_config": GRID | {"depth": 2, "num_heads": 4, "image_size": SIDE}},
        ("<image>", "<vis>", "</vis>", "<video>"), {"image_token": "<image>", "video_token": "<video>"}, {},
        ("Glm4vImageProcessorPil", {"patch_size": PATCH, "merge_size": 2, "size": {"shortest_edge": 256, "longest_edge": 8192}}),
    ),
    "glm_ocr": Case(
        "GlmOcr", TEXT | {
            "model_type": "glm_ocr_text", "head_dim": 16,
            "rope_parameters": {
                "rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 1.0, "mrope_section": [2, 3, 3]}},
        {"vision_config": GRID | {"depth": 2, "num_heads": 4}},
        ("<image>", "<vis>", "</vis>", "<video>"), {"image_token": "<image>", "video_token": "<video>"}, {"processor_class": "Glm46VProcessor"},
        ("Glm46VImageProcessorPil", {"patch_size": PATCH, "merge_size": 2, "size": {"shortest_edge": 256, "longest_edge": 8192}}),
    ),
    "paddleocr_vl": Case(
        "PaddleOCRVL", TEXT | {
            "model_type": "paddleocr_vl_text", "head_dim": 12,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 2, 2]}},
        {"vision_config": VISION | {"spatial_merge_size": 2}}, ("<image>", "<vis>", "</vis>"), {"image_token": "<image>"}, {},
        ("PaddleOCRVLImageProcessorPil", {"patch_size": PATCH, "merge_size": 2, "size": {"shortest_edge": 256, "longest_edge": 8192}}),
    ),
    "minicpmv4_6": Case(
        "MiniCPMV4_6",
        TEXT | {
            "model_type": "qwen3_5_text", "head_dim": 16, "linear_key_head_dim": 24, "linear_value_head_dim": 16,
            "linear_num_key_heads": 2, "linear_num_value_heads": 4, "layer_types": ["linear_attention", "full_attention"],
            "rope_parameters": {
                "rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25, "mrope_section": [1, 1, 0]}},
        {"vision_config": VISION | {"insert_layer_id": 0}, "insert_layer_id": 0, "image_size": SIDE},
        ("<image>", "<im>", "</im>", "<slice>", "</slice>", "<id>", "</id>", "0", "1"),
        {"image_token": "<image>", "image_start_token": "<im>", "image_end_token": "</im>", "slice_start_token": "<slice>",
         "slice_end_token": "</slice>", "image_id_start_token": "<id>", "image_id_end_token": "</id>", "video_token": "<video>"},
        {}, ("MiniCPMV4_6ImageProcessorPil", {"patch_size": PATCH, "scale_resolution": SIDE, "max_slice_nums": 4}),
    ),
    "deepseek_ocr2": Case(
        "DeepseekOcr2",
        TEXT | {"model_type": "deepseek_ocr2_text", "n_routed_experts": 8, "n_shared_experts": 2, "num_experts_per_tok": 3,
                "moe_intermediate_size": 20, "mlp_layer_types": ["dense", "sparse"]},
        {"vision_config": {"sam_config": SAM, "encoder_config": TEXT | {"hidden_size": 24, "num_key_value_heads": 4, "vocab_size": 1}}},
        ("<image>",), {}, {"processor_class": "DeepseekOcr2Processor", "patch_size": 1},
        ("DeepseekOcr2ImageProcessorPil", {"size": {"height": 64, "width": 64}, "tile_size": 48, "max_patches": 3}),
    ),
}  # fmt: skip
MARK = "<sound>"
ENCODER = dict(hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, num_mel_bins=16)
OLDER = dict(d_model=64, encoder_ffn_dim=96, encoder_layers=2, encoder_attention_heads=4, num_mel_bins=16)


class SoundCase(NamedTuple):
    """A model of transformers: the name before `ForConditionalGeneration`, its decoder, its configuration, what its processor says,
    its extractor's class and settings."""

    name: str
    text: dict[str, Any]
    config: dict[str, Any]
    processor: dict[str, Any]
    extractor: tuple[str, dict[str, Any]]


QWEN3 = TEXT | {"model_type": "qwen3", "head_dim": 12}
WHISPER = ("WhisperFeatureExtractor", {"feature_size": 16, "chunk_length": 1})
SOUND_CASES = {
    "qwen3_asr": SoundCase(
        "Qwen3ASR", QWEN3,
        {"audio_config": OLDER | {"downsample_hidden_size": 8, "output_dim": 48, "n_window_infer": 200}},
        {}, ("Qwen3ASRFeatureExtractor", {"feature_size": 16}),
    ),
    "glmasr": SoundCase(
        "GlmAsr", TEXT | {"model_type": "llama"}, {"audio_config": ENCODER | {"intermediate_size": 256}}, {"audio_token": MARK},
        ("WhisperFeatureExtractor", {"feature_size": 16, "chunk_length": 2}),
    ),
    "audioflamingo3": SoundCase(
        "AudioFlamingo3", TEXT | {"model_type": "qwen2"}, {"audio_config": ENCODER | {"max_source_positions": 50}}, {}, WHISPER,
    ),
    "moss_transcribe_diarize": SoundCase(
        "MossTranscribeDiarize", QWEN3,
        {"audio_config": ENCODER | {"max_source_positions": 100}, "audio_chunk_size": 2 * 16_000},
        {"audio_token": MARK}, ("MossTranscribeDiarizeFeatureExtractor", {"feature_size": 16, "chunk_length": 2}),
    ),
}  # fmt: skip
TEMPLATE = (
    "{% for message in messages %}<bos> {{ message.role }} "
    "{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}"
    "{% if part.type == 'image' %}<image>{% else %} {{ part.text }}{% endif %}{% endfor %}{% endif %} <eos> {% endfor %}"
)


def save(path: Path, key: str) -> torch.nn.Module:
    """Save the model of a case, with tokenizer and processor; returns it as transformers computes it."""
    case = CASES[key]
    torch.manual_seed(1)
    config = getattr(transformers, f"{case.name}Config")(
        text_config=case.text, image_token_id=VECTOR, image_token_index=VECTOR, pad_token_id=0, **case.config
    )
    model = unlike(getattr(transformers, f"{case.name}ForConditionalGeneration")(config))
    model.save_pretrained(path)
    file = path / "model.safetensors"
    own = {name.replace("language_model.model.blocks.", "language_model.model.layers."): each for name, each in load_file(file).items()}
    save_file(own, file, {"format": "pt"})  # transformers saves Kimi K2.5 under names that no checkpoint has
    save_words(path, case.words, case.extra)
    name, settings = case.images
    source: Any = transformers if name.endswith("Pil") else module_of(config.model_type)
    getattr(source, name)(**settings).save_pretrained(path)
    (path / "processor_config.json").write_text(json.dumps(case.processor))
    return model


def unlike(model: torch.nn.Module) -> torch.nn.Module:
    """A new model whose norms and biases are no longer ones and zeros."""
    for parameter in model.parameters():
        if parameter.dim() == 1:
            torch.nn.init.normal_(parameter, mean=float(parameter.detach().mean()), std=0.1)
    return model.eval()


def save_words(path: Path, own: Sequence[str], extra: dict[str, str], template: str = TEMPLATE) -> None:
    """Save a tokenizer whose numbers from VECTOR on are these words, of images or sounds."""
    words = {word: VECTOR + at for at, word in enumerate(own)}
    vocab = {f"{chr(97 + at % 26)}{at}": at for at in range(3, VECTOR)} | {"<pad>": 0, "<bos>": 1, "<eos>": 2} | words
    tokenizer = Tokenizer(WordLevel(vocab, unk_token="a26"))
    tokenizer.pre_tokenizer, tokenizer.decoder = WhitespaceSplit(), Fuse()
    tokenizer.add_special_tokens([AddedToken(word, normalized=False) for word in ("<bos>", "<eos>", *words)])
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<bos>", eos_token="<eos>", pad_token="<pad>", extra_special_tokens=extra
    )
    fast.chat_template = template
    fast.save_pretrained(path)
