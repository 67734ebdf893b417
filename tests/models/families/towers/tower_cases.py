"""Small random models that read images, as transformers makes them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import AddedToken, Tokenizer
from tokenizers.decoders import Fuse
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit

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


def save_reader(path: Path, name: str = "SmolVLM") -> torch.nn.Module:
    """`save_model` with a tokenizer, a chat template and sizes of tiles; SPELLED are its special tokens."""
    model = save_model(path, name)
    vocab = {f"{chr(97 + at % 26)}{at}": at for at in range(3, TEXT["vocab_size"])} | {"<pad>": 0, "<bos>": 1, "<eos>": 2}
    for word, token in SPELLED.items():
        vocab = {each: at for each, at in vocab.items() if at != token} | {word: token}
    tokenizer = Tokenizer(WordLevel(vocab, unk_token="a26"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    tokenizer.decoder = Fuse()
    tokenizer.add_special_tokens([AddedToken(word, normalized=False) for word in ("<bos>", "<eos>", *SPELLED)])
    tokenizer.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE, "eos_token": "<eos>"}))
    sizes = {"size": {"longest_edge": 2 * SIDE}, "max_image_size": {"longest_edge": SIDE}}
    (path / "preprocessor_config.json").write_text(json.dumps(sizes))
    return model


SPELLED = {
    "<image>": IMAGE, "<fake_token_around_image>": 91, "<global-img>": 92,
    **{f"<row_{at // 2 + 1}_col_{at % 2 + 1}>": 93 + at for at in range(4)},
}  # fmt: skip
TEMPLATE = (
    "{% for message in messages %}<bos> {{ message.role }} "
    "{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}"
    "{% if part.type == 'image' %}<image>{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %} <eos> {% endfor %}"
)
"""SmolVLM's in a shorter form."""
