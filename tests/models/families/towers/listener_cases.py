"""Small random models that listen, as transformers makes them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from tokenizers import AddedToken, Tokenizer
from tokenizers.decoders import Fuse
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit

STATES, SPAN, PLACES = 50, 64, 40
SAMPLES = 2 * STATES * 160
SIZES: dict[str, Any] = dict(
    vocab_size=97, d_model=64, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4, decoder_attention_heads=4,
    encoder_ffn_dim=96, decoder_ffn_dim=80, max_source_positions=STATES, max_target_positions=PLACES, num_mel_bins=80,
    pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=3, init_std=0.15, begin_suppress_tokens=None,
)  # fmt: skip


def save_listener(path: Path, seed: int = 1, **changes: Any) -> torch.nn.Module:
    """Save a random model; returns it as transformers computes it."""
    torch.manual_seed(seed)
    model = transformers.WhisperForConditionalGeneration(transformers.WhisperConfig(**SIZES | changes)).eval()
    for parameter in model.parameters():
        if parameter.dim() == 1:  # norms and biases are ones and zeros in a new model
            torch.nn.init.normal_(parameter, mean=float(parameter.detach().mean()), std=0.1)
    model.generation_config = transformers.GenerationConfig(eos_token_id=model.config.eos_token_id, pad_token_id=0)
    model.save_pretrained(path)
    return model


TIMES, END = 46, 37
"""The first token that is a time, of which one second has 51; the token that ends a transcript: as in Whisper, those below are texts,
those between them steer."""
SPELLED = {
    name: END + at
    for at, name in enumerate(("<eos>", "<|startoftranscript|>", "<|en|>", "<|de|>", "<|transcribe|>", "<|translate|>", "<|startofprev|>", "<|nospeech|>"))
} | {"<|notimestamps|>": TIMES - 1}


def save_transcriber(path: Path, certainty: float = 4.0) -> torch.nn.Module:
    """`save_listener` with a tokenizer; SPELLED are its special tokens. Logits are `certainty` times as far apart."""
    model = save_listener(path, seed=19, init_std=0.3, eos_token_id=END, decoder_start_token_id=END + 1)
    with torch.no_grad():
        for each in model.model.decoder.layer_norm.parameters():
            each *= certainty
    model.save_pretrained(path)
    vocab = {f"{chr(97 + at % 26)}{at}": at for at in range(SIZES["vocab_size"]) if at not in SPELLED.values()} | SPELLED
    tokenizer = Tokenizer(WordLevel(vocab, unk_token="a26"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    tokenizer.decoder = Fuse()
    tokenizer.add_special_tokens([AddedToken(word, normalized=False) for word in SPELLED])
    tokenizer.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<eos>"}))
    return model


def sounds(count: int, seed: int = 0) -> np.ndarray:
    """Tones that change: float32 [count, SAMPLES]."""
    draw = np.random.default_rng(seed)
    at = np.arange(SAMPLES) / 16_000
    tones = [sum(draw.random() * np.sin(6.28 * draw.integers(80, 4000) * at * (1 + draw.random() * at)) for _ in range(5)) for _ in range(count)]
    return (np.stack(tones) / 5).astype(np.float32)
