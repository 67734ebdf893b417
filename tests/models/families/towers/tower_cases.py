"""Small random models that read images, as transformers makes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers

IMAGE = 90
SIDE, PATCH, SHUFFLE = 32, 4, 2
TILE_TOKENS = (SIDE // PATCH // SHUFFLE) ** 2
TEXT: dict[str, Any] = dict(
    model_type="llama", vocab_size=97, hidden_size=48, intermediate_size=80, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=1024, rms_norm_eps=1e-5, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    initializer_range=0.15,
)  # fmt: skip
VISION: dict[str, Any] = dict(
    hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, image_size=SIDE, patch_size=PATCH,
    initializer_range=0.15,
)  # fmt: skip


def save_model(path: Path, name: str = "Idefics3", **changes: Any) -> torch.nn.Module:
    """Save a random model; returns it as transformers computes it."""
    torch.manual_seed(1)
    config = getattr(transformers, f"{name}Config")(
        text_config=TEXT | changes, vision_config=VISION, scale_factor=SHUFFLE, image_token_id=IMAGE, pad_token_id=0
    )
    model = getattr(transformers, f"{name}ForConditionalGeneration")(config).eval()
    for parameter in model.parameters():
        if parameter.dim() == 1:  # norms and biases are ones and zeros in a new model
            torch.nn.init.normal_(parameter, mean=float(parameter.detach().mean()), std=0.1)
    model.save_pretrained(path)
    return model
