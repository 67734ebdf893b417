"""Small random models that read sounds among the tokens of their prompts, as transformers makes them, with its own processing."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from transformers import Qwen2AudioProcessor, WhisperFeatureExtractor

from tests.models.families.towers.listener_cases import SAMPLES, STATES
from tests.models.families.towers.seeing_cases import TEXT, save_words

AUDIO = 90
WORDS = {"<|AUDIO|>": AUDIO, "<|audio_bos|>": 91, "<|audio_eos|>": 92, "<|im_start|>": 93, "<|im_end|>": 94}
MARK = "<|audio_bos|><|AUDIO|><|audio_eos|>"
ENCODER: dict[str, Any] = dict(
    d_model=64, encoder_layers=3, encoder_attention_heads=4, encoder_ffn_dim=96, num_mel_bins=128, max_source_positions=STATES
)


def save_hearing(path: Path) -> torch.nn.Module:
    """Save a random model with what reads text for it; returns it as transformers computes it."""
    torch.manual_seed(1)
    config = transformers.Qwen2AudioConfig(
        text_config=TEXT | {"model_type": "qwen2", "tie_word_embeddings": False},
        audio_config=ENCODER | {"model_type": "qwen2_audio_encoder"}, audio_token_index=AUDIO,
    )  # fmt: skip
    model = transformers.Qwen2AudioForConditionalGeneration(config).eval()
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1:  # norms and biases are ones and zeros in a new model
            torch.nn.init.normal_(parameter, mean=float(parameter.detach().mean()), std=0.1)
        elif any(part in name for part in ("audio", "projector")):
            torch.nn.init.normal_(parameter, std=0.15)
    model.save_pretrained(path)
    save_words(path, WORDS, TEMPLATE)
    return model


def processed(sounds: Sequence[np.ndarray]) -> dict[str, torch.Tensor]:
    """What transformers makes of the sounds float32 [N] of one prompt, with how many tokens stand for each."""
    extractor = WhisperFeatureExtractor(feature_size=128, chunk_length=SAMPLES // 16_000)
    processor = Qwen2AudioProcessor.__new__(Qwen2AudioProcessor)
    processor.feature_extractor, processor.audio_token = extractor, "<|AUDIO|>"
    found, replaced = processor._process_audio([*sounds], sampling_rate=16_000, return_tensors="pt")
    counts = torch.tensor([each.count("<|AUDIO|>") for each in replaced])
    return {**{key: found[key] for key in ("input_features", "feature_attention_mask")}, "counts": counts}


def right(model: Any, tokens: Sequence[int], sounds: Sequence[np.ndarray], count: int) -> tuple[list[int], torch.Tensor]:
    """transformers' greedy answer of so many tokens, and their log-probabilities."""
    made = processed(sounds)
    assert [*tokens].count(AUDIO) == int(made.pop("counts").sum())
    with torch.inference_mode():
        found = model.generate(
            input_ids=torch.tensor([tokens]), **made, max_new_tokens=count, do_sample=False, eos_token_id=None,
            output_logits=True, return_dict_in_generate=True,
        )  # fmt: skip
    answer = found.sequences[0, len(tokens) :]
    return answer.tolist(), torch.cat(found.logits).log_softmax(-1).gather(1, answer[:, None])[:, 0]


TEMPLATE = Qwen2AudioProcessor.default_chat_template.fget(None)  # type: ignore[attr-defined]  # a property, which reads nothing
