"""A small random thinker of Qwen2.5-Omni, as transformers makes it, with its own processing of images and sounds."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from transformers import WhisperFeatureExtractor

from tests.models.families.towers import seeing_cases
from tests.models.families.towers.seeing_cases import CASES, IMAGE, TEXT, save_words

AUDIO, WINDOW = 93, 10
WORDS = ("<|IMAGE|>", "<|vision_bos|>", "<|vision_eos|>", "<|AUDIO|>", "<|audio_bos|>", "<|audio_eos|>")
IMAGE_MARK, SOUND_MARK = "<|vision_bos|><|IMAGE|><|vision_eos|>", "<|audio_bos|><|AUDIO|><|audio_eos|>"
TEMPLATE = (
    "{% for message in messages %}<bos> {% if message.content is string %}{{ message.content }}{% else %}"
    "{% for part in message.content %}{% if part.type == 'image' %}IMAGE{% elif part.type == 'audio' %}SOUND"
    "{% else %} {{ part.text }}{% endif %}{% endfor %}{% endif %} <eos> {% endfor %}"
).replace("IMAGE", IMAGE_MARK).replace("SOUND", SOUND_MARK)  # fmt: skip
CHUNK_S = 30


def save_omni(path: Path) -> torch.nn.Module:
    """Save a random thinker with what reads text for it; returns it as transformers computes it."""
    torch.manual_seed(1)
    grid = CASES["grid"]
    vision = {"num_heads": 4, "depth": 4, "hidden_size": 64, "intermediate_size": 96, "patch_size": 4}
    vision |= {"window_size": 16, "out_hidden_size": 48, "fullatt_block_indexes": [2]}
    audio = dict(d_model=64, encoder_layers=3, encoder_attention_heads=4, encoder_ffn_dim=96, n_window=WINDOW, output_dim=48)
    config = transformers.Qwen2_5OmniThinkerConfig(
        text_config=TEXT | grid.text | {"model_type": "qwen2_5_omni_text"}, vision_config=vision, audio_config=audio,
        image_token_index=IMAGE, audio_token_index=AUDIO, video_token_index=96, vision_start_token_id=IMAGE + 1,
        vision_end_token_id=IMAGE + 2, audio_start_token_id=AUDIO + 1, audio_end_token_id=AUDIO + 2,
    )  # fmt: skip
    model = transformers.Qwen2_5OmniThinkerForConditionalGeneration(config).eval()
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1:  # norms and biases are ones and zeros in a new model
            torch.nn.init.normal_(parameter, mean=float(parameter.detach().mean()), std=0.1)
        elif any(part in name for part in ("audio", "visual")):
            torch.nn.init.normal_(parameter, std=0.15)
    model.save_pretrained(path)
    save_words(path, {word: IMAGE + at for at, word in enumerate(WORDS)}, TEMPLATE)
    (path / "preprocessor_config.json").write_text(json.dumps(grid.settings | {"feature_size": 128, "chunk_length": CHUNK_S}))
    return model


def right(
    model: Any, tokens: Sequence[int], images: Sequence[np.ndarray], sounds: Sequence[np.ndarray], count: int
) -> tuple[list[int], torch.Tensor]:
    """transformers' greedy answer of so many tokens, and their log-probabilities."""
    given: dict[str, Any] = seeing_cases.processed("grid", images) if images else {}
    if sounds:
        extractor = WhisperFeatureExtractor(feature_size=128, chunk_length=CHUNK_S)
        made = extractor([*sounds], sampling_rate=16_000, padding="max_length", return_attention_mask=True, return_tensors="pt")
        given |= {"input_features": made["input_features"], "feature_attention_mask": made["attention_mask"]}
    ids = torch.tensor([tokens])
    with torch.inference_mode():
        found = model.generate(
            input_ids=ids, attention_mask=torch.ones_like(ids), **given, max_new_tokens=count, do_sample=False, eos_token_id=None,
            output_logits=True, return_dict_in_generate=True,
        )  # fmt: skip
    answer = found.sequences[0, len(tokens) :]
    return answer.tolist(), torch.cat(found.logits).log_softmax(-1).gather(1, answer[:, None])[:, 0]
