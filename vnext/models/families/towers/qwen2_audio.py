"""Qwen2-Audio: Whisper's encoder, Qwen 2."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from vnext.models.config.json_keys import Json, positive, required, usual
from vnext.models.config.model_config import ModelConfig, text_part
from vnext.models.families import qwen2
from vnext.models.families.towers import whisper
from vnext.models.families.towers.llava_onevision import HEADS, PROJECTORS, ROOTS, present
from vnext.models.layers.assembly import Source, linear, llama_parts
from vnext.models.layers.decoder import Names, Params, assemble_decoder, forward, logits
from vnext.models.layers.sharding import Layout, Sized
from vnext.models.layers.tower import SoundTowerParams, own_config

__all__ = ["WEIGHT_AXES", "assemble", "assemble_tower", "forward", "logits", "parse", "tower_config"]

TOWERS = ("audio_tower.", "model.audio_tower.")
PLAIN, FILED = "model.", "audio.multi_modal_projector."
"""In the place of ROOTS and of PROJECTORS where a GGUF file has the tensors."""
ENCODER = usual(
    num_mel_bins=128, encoder_layers=32, encoder_attention_heads=20, encoder_ffn_dim=5120, d_model=1280, activation_function="gelu"
)
TEXT = usual(vocab_size=151936, hidden_size=4096, intermediate_size=22016, num_hidden_layers=32, num_attention_heads=32)


def WEIGHT_AXES(config: ModelConfig) -> Mapping[str, Layout]:  # noqa: N802  (a field of Family)
    sound = config.sound
    assert sound is not None
    projection = Layout((Sized(sound.width),), Sized(sound.hidden_size))
    return {**whisper.tower_axes(sound), "multi_modal_projector.linear": projection}


def parse(raw: Json, generation: Json) -> ModelConfig:
    """The configuration of the language part, with that of the tower. Raises ModelError."""
    config = qwen2.parse(text_part(raw | {"text_config": TEXT | required(raw, "text_config", None)}), generation)
    sound = whisper.parse_sound(ENCODER | required(raw, "audio_config", {}))
    token = positive(raw, "audio_token_index", 151646)
    return msgspec.structs.replace(config, sound=msgspec.structs.replace(sound, token=token, width=config.hidden_size))


def tower_config(config: ModelConfig) -> ModelConfig:
    """As own_config."""
    assert config.sound is not None
    return own_config(config, config.sound, "gelu", config.sound.states)


def assemble(source: Source, config: ModelConfig) -> Params:
    names = Names(root=present(source, (*ROOTS, PLAIN), "norm.weight"), head=present(source, HEADS))
    return assemble_decoder(source, config, llama_parts(source, qkv_bias=True), names)


def assemble_tower(source: Source, config: ModelConfig) -> SoundTowerParams:
    found = whisper.assemble_sound(source, config, present(source, TOWERS, "conv1.weight"))
    return found._replace(projection=linear(source, present(source, (*PROJECTORS, FILED), "linear.weight"), "linear", bias=True))
