"""Small random models of each family that reads images, with transformers' own processing of images beside them."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import torch
import transformers
from PIL import Image
from tokenizers import AddedToken, Tokenizer
from tokenizers.decoders import Fuse
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers.video_utils import VideoMetadata

IMAGE, FILM, SIDE = 90, 93, 32
TEXT: dict[str, Any] = dict(
    vocab_size=97, hidden_size=48, intermediate_size=80, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
    max_position_embeddings=2048, rms_norm_eps=1e-5, pad_token_id=0, bos_token_id=1, eos_token_id=2, initializer_range=0.15,
)  # fmt: skip
VISION: dict[str, Any] = dict(hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4, image_size=SIDE, patch_size=4)


class SeeingCase(NamedTuple):
    """`name`: of transformers' classes; `own`: of the configuration; `words`: special tokens, the first of which is that of vectors;
    `settings`: preprocessor_config.json; `processor`: (module, class, what it gets besides)."""

    name: str
    text: dict[str, Any]
    vision: dict[str, Any]
    own: dict[str, Any]
    words: tuple[str, ...]
    settings: dict[str, Any]
    processor: tuple[str, str, dict[str, Any]]


CASES = {
    "anyres": SeeingCase(
        "LlavaOnevision", {"model_type": "qwen2"}, {"model_type": "siglip_vision_model", "vision_use_head": False},
        {"image_token_index": IMAGE, "video_token_index": 96, "vision_aspect_ratio": "anyres_max_3"}, ("<image>",),
        {"size": {"height": SIDE, "width": SIDE}, "image_grid_pinpoints": [[32, 32], [32, 64], [64, 32], [64, 64], [96, 96]]},
        ("llava_onevision.image_processing_pil_llava_onevision", "LlavaOnevisionImageProcessorPil", {}),
    ),
    "rows": SeeingCase(
        "Mistral3", {"model_type": "mistral", "head_dim": 12, "sliding_window": None},
        {"model_type": "pixtral", "hidden_act": "silu", "image_size": 2 * SIDE}, {"image_token_index": IMAGE},
        ("[IMG]", "[IMG_BREAK]", "[IMG_END]"), {"size": {"longest_edge": 2 * SIDE}},
        ("pixtral.image_processing_pil_pixtral", "PixtralImageProcessorPil", {"patch_size": 8}),
    ),
    "whole": SeeingCase(
        "Gemma3",
        {
            "model_type": "gemma3_text", "head_dim": 12, "query_pre_attn_scalar": 12, "sliding_window": 30,
            "layer_types": ["sliding_attention", "full_attention"],
        },
        {"model_type": "siglip_vision_model", "vision_use_head": False},
        {"image_token_index": IMAGE, "mm_tokens_per_image": 16, "boi_token_index": 91, "eoi_token_index": 92},
        ("<image_soft_token>", "<start_of_image>", "<end_of_image>"), {"size": {"height": SIDE, "width": SIDE}},
        ("gemma3.image_processing_pil_gemma3", "Gemma3ImageProcessorPil", {}),
    ),
    "grid": SeeingCase(
        "Qwen2_5_VL", {"model_type": "qwen2_5_vl_text", "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 2, 3]}},
        {"model_type": "qwen2_5_vl_vision", "num_hidden_layers": 4, "window_size": 16, "out_hidden_size": 48, "fullatt_block_indexes": [2]},
        {"image_token_id": IMAGE, "video_token_id": FILM, "vision_start_token_id": 91, "vision_end_token_id": 92},
        ("<|image_pad|>", "<|vision_start|>", "<|vision_end|>", "<|video_pad|>"),
        {"size": {"shortest_edge": 16**2, "longest_edge": 96**2}, "patch_size": 4, "merge_size": 2, "temporal_patch_size": 2},
        ("qwen2_vl.image_processing_pil_qwen2_vl", "Qwen2VLImageProcessorPil", {}),
    ),
    "deep": SeeingCase(
        "Qwen3VL", {"model_type": "qwen3_vl_text", "head_dim": 12, "num_hidden_layers": 3, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 2, 2]}},
        {"model_type": "qwen3_vl_vision", "num_hidden_layers": 4, "out_hidden_size": 48, "num_position_embeddings": 36, "deepstack_visual_indexes": [0, 2]},
        {"image_token_id": IMAGE, "video_token_id": FILM, "vision_start_token_id": 91, "vision_end_token_id": 92},
        ("<|image_pad|>", "<|vision_start|>", "<|vision_end|>", "<|video_pad|>"),
        {"size": {"shortest_edge": 16**2, "longest_edge": 96**2}, "patch_size": 4, "merge_size": 2, "temporal_patch_size": 2},
        ("qwen2_vl.image_processing_pil_qwen2_vl", "Qwen2VLImageProcessorPil", {}),
    ),
}  # fmt: skip
EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
"""Gate and up have as many outputs as inputs: what is which shows in down alone."""
NETS = {
    "num_hidden_layers": 4, "head_dim": 24, "layer_types": ["linear_attention", "full_attention", "linear_attention", "full_attention"],
    "linear_key_head_dim": 24, "linear_value_head_dim": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5, "mrope_section": [2, 2, 2]},
}  # fmt: skip
DEEP = CASES["deep"]
PLACES = DEEP.vision | {"model_type": "qwen3_5_vision"}
PLACES.pop("deepstack_visual_indexes")
SHARED = {**EXPERTS, "shared_expert_intermediate_size": 40}
CASES |= {
    "experts": DEEP._replace(
        name="Qwen3VLMoe", text={**DEEP.text, **EXPERTS, "model_type": "qwen3_vl_moe_text", "mlp_only_layers": [1]},
        vision=DEEP.vision | {"model_type": "qwen3_vl_moe_vision"},
    ),
    "nets": DEEP._replace(name="Qwen3_5", text={**NETS, "model_type": "qwen3_5_text"}, vision=PLACES),
    "nets_experts": DEEP._replace(
        name="Qwen3_5Moe", text={**NETS, **SHARED, "model_type": "qwen3_5_moe_text"}, vision=PLACES | {"model_type": "qwen3_5_moe_vision"}
    ),
}  # fmt: skip
CASES["deep_parallel"] = DEEP._replace(
    name="CohereCompass",
    text={
        "model_type": "cohere_compass_text", "layer_types": ["sliding_attention", "full_attention"], "sliding_window": 30, "logit_scale": 0.5,
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": 1000.0, "mrope_section": [2, 2, 2]},
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 1, 1]},
        },
    },
    vision=DEEP.vision | {"model_type": "cohere_compass_vision"}, words=tuple(word.upper() for word in DEEP.words),
)  # fmt: skip
GRIDS = ("grid", "deep", "experts", "nets", "nets_experts", "deep_parallel")
"""Whose heads turn by rows and columns."""
MARKS = {"whole": "<start_of_image>"}
"""What stands for an image in a text, where it is not the token of vectors."""


FILMS = {"fps": 2, "min_frames": 4, "max_frames": 9, "size": {"shortest_edge": 16**2, "longest_edge": 64**2}}
ALL_FILMS = FILMS | {"size": {"shortest_edge": 6 * 16**2, "longest_edge": 9 * 48**2}}
"""What video_preprocessor_config.json says, of a frame and of all frames."""


def save_seeing(path: Path, kind: str) -> torch.nn.Module:
    """Save a random model with what reads text and images for it; returns it as transformers computes it."""
    torch.manual_seed(1)
    case = CASES[kind]
    own = dict(case.own)
    if "image_grid_pinpoints" in case.settings:
        own["image_grid_pinpoints"] = case.settings["image_grid_pinpoints"]
    config = getattr(transformers, f"{case.name}Config")(
        text_config=TEXT | case.text, vision_config=VISION | case.vision, tie_word_embeddings=False, **own
    )
    model = getattr(transformers, f"{case.name}ForConditionalGeneration")(config).eval()
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1:  # norms and biases are ones and zeros in a new model
            torch.nn.init.normal_(parameter, mean=float(parameter.detach().mean()), std=0.1)
        elif any(part in name for part in ("vision", "visual", "projector")):
            torch.nn.init.normal_(parameter, std=0.15)
    model.save_pretrained(path)
    template = TEMPLATE.replace("IMAGE", MARKS.get(kind, case.words[0]))
    for word in case.words:
        template = template.replace(word.lower(), word)
    save_words(path, {word: IMAGE + at for at, word in enumerate(case.words)}, template)
    (path / "preprocessor_config.json").write_text(json.dumps(case.settings))
    if kind in GRIDS:
        (path / "video_preprocessor_config.json").write_text(json.dumps(FILMS if kind == "grid" else ALL_FILMS))
    return model


def save_words(path: Path, words: dict[str, int], template: str) -> None:
    """Save a tokenizer that knows these words as special tokens, and a template."""
    vocab = {f"{chr(97 + at % 26)}{at}": at for at in range(3, TEXT["vocab_size"])} | {"<pad>": 0, "<bos>": 1, "<eos>": 2}
    vocab = {each: at for each, at in vocab.items() if at not in words.values()} | words
    tokenizer = Tokenizer(WordLevel(vocab, unk_token="a26"))
    tokenizer.pre_tokenizer, tokenizer.decoder = WhitespaceSplit(), Fuse()
    tokenizer.add_special_tokens([AddedToken(word, normalized=False) for word in ("<bos>", "<eos>", *words)])
    tokenizer.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(json.dumps({"chat_template": template, "eos_token": "<eos>"}))


def processed(kind: str, images: Sequence[np.ndarray]) -> dict[str, torch.Tensor]:
    """What transformers makes of the images of one prompt."""
    case, pictures = CASES[kind], [*map(Image.fromarray, images)]
    module, name, more = case.processor
    processor = getattr(import_module(f"transformers.models.{module}"), name)(**case.settings, **more)
    found = dict(processor([pictures] if kind == "anyres" else pictures, return_tensors="pt"))
    found.pop("num_crops", None)
    return found


@cache
def films_of(name: str) -> ModuleType:
    """transformers' module that reads videos for qwen2_vl or qwen3_vl, whose names and sizes need no torchvision, if it is missing."""
    import_module("transformers.video_processing_utils")
    names = ["torchvision", "torchvision.transforms", "torchvision.transforms.v2", "torchvision.transforms.v2.functional"]
    lacking = {} if find_spec("torchvision") else {each: ModuleType(each) for each in names}
    sys.modules.update(lacking)
    try:
        return import_module(f"transformers.models.{name}.video_processing_{name}")
    finally:
        for each in lacking:
            del sys.modules[each]


def processed_film(kind: str, frames: np.ndarray, rate: float) -> tuple[torch.Tensor, torch.Tensor, float]:
    """What transformers makes of a video: numbers of patches, their grid, and seconds from one row of them to the next. Its own
    resizing needs torchvision: each frame is resized by Pillow, as its images are."""
    is_timed, settings = kind == "grid", FILMS if kind == "grid" else ALL_FILMS
    own = films_of("qwen2_vl" if is_timed else "qwen3_vl")
    kept = own.Qwen2VLVideoProcessor if is_timed else own.Qwen3VLVideoProcessor
    processor = kept.__new__(kept)
    processor.__dict__.update({"num_frames": None, **{key: value for key, value in settings.items() if key != "size"}})
    metadata = VideoMetadata(total_num_frames=len(frames), fps=rate)
    numbers = [int(each) for each in processor.sample_frames(metadata, fps=settings["fps"])]
    metadata.frames_indices, (height, width) = numbers, frames.shape[1:3]
    size = {"min_pixels": settings["size"]["shortest_edge"], "max_pixels": settings["size"]["longest_edge"], "factor": 8}
    height, width = own.smart_resize(*(() if is_timed else (len(numbers),)), height, width, **size)
    pictures = [Image.fromarray(frames[each]).resize((width, height), Image.Resampling.BICUBIC) for each in numbers]
    module, name, more = CASES[kind].processor
    images = getattr(import_module(f"transformers.models.{module}"), name)(**CASES[kind].settings, **more)
    scaled = [images.rescale(np.asarray(each).transpose(2, 0, 1), 1 / 255) for each in pictures]
    normed = [images.normalize(each, kept.image_mean, kept.image_std) for each in scaled]
    patches, *grid = processor.patchify(torch.from_numpy(np.stack(normed))[None].float(), 4, 2, 2)
    return patches[0], torch.tensor([grid]), 2 / metadata.sampled_fps


TEMPLATE = (
    "{% for message in messages %}<bos> {{ message.role }} "
    "{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}"
    "{% if part.type == 'image' %}IMAGE{% elif part.type == 'video' %}<|vision_start|><|video_pad|><|vision_end|>"
    "{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %} <eos> {% endfor %}"
)
