"""Qwen2.5-Omni: text out of images and sounds, heard by windows."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
import numpy as np

from vnext.models.config.json_keys import Json, positive, required
from vnext.models.config.model_config import ModelConfig
from vnext.models.families.towers import qwen2_5_vl, whisper
from vnext.models.families.towers.llava_onevision import present
from vnext.models.families.towers.qwen2_5_vl import project
from vnext.models.families.towers.qwen2_audio import ENCODER
from vnext.models.families.towers.siglip import tower_config
from vnext.models.layers.assembly import Source, linear, llama_parts
from vnext.models.layers.decoder import Names, Params, assemble_decoder, forward, logits
from vnext.models.layers.sharding import Layout, Sized
from vnext.models.layers.tower import SoundTowerParams, TowerParams, own_config

__all__ = [
    "WEIGHT_AXES", "assemble", "assemble_sound", "assemble_tower", "forward", "logits", "parse", "project", "sound_config",
    "tower_config",
]  # fmt: skip

ROOTS = ("thinker.", "")
TOWERS = tuple(f"{root}visual." for root in ROOTS)
SOUND_S, STATES = 300, 50
"""Seconds of a sound that the processor cuts off behind, and states of a second."""
PERIOD = 10_000.0
"""Positions over which the slowest numbers of a place turn once around."""


def WEIGHT_AXES(config: ModelConfig) -> Mapping[str, Layout]:  # noqa: N802  (a field of Family)
    sound = config.sound
    assert sound is not None
    return {
        **whisper.tower_axes(sound),
        **qwen2_5_vl.WEIGHT_AXES(config, TOWERS),
        "ln_post": whisper.NORM,
        "audio_tower.proj": Layout((Sized(sound.width),), Sized(sound.hidden_size)),
    }


def parse(raw: Json, generation: Json) -> ModelConfig:
    """The configuration of the language part, with those of both towers. Raises ModelError."""
    own = raw | required(raw, "thinker_config", {})
    text = required(own, "text_config", {}) | {"tie_word_embeddings": own.get("tie_word_embeddings", False)}
    named = {"image_token_id": positive(own, "image_token_index", 151655), "architectures": raw["architectures"]}
    config = qwen2_5_vl.parse(own | named | {"text_config": text}, generation)
    assert config.tower is not None
    audio = ENCODER | required(own, "audio_config", {})
    found = whisper.parse_sound(audio | {"max_source_positions": SOUND_S * STATES})
    token, window = positive(own, "audio_token_index", 151646), positive(audio, "n_window", 100)
    sound = msgspec.structs.replace(found, token=token, width=config.hidden_size, window=window)
    tower = msgspec.structs.replace(config.tower, film_token=0, per_second=0, marks="omni")
    return msgspec.structs.replace(config, tower=tower, sound=sound)


def sound_config(config: ModelConfig) -> ModelConfig:
    """As own_config, of the encoder of sounds."""
    assert config.sound is not None
    return own_config(config, config.sound, "gelu", config.sound.window)


def assemble(source: Source, config: ModelConfig) -> Params:
    root = present(source, ROOTS, "model.norm.weight")
    names = Names(root=root + "model.", head=root + "lm_head.weight")
    return assemble_decoder(source, config, llama_parts(source, qkv_bias=True), names)


def assemble_tower(source: Source, config: ModelConfig) -> TowerParams:
    return qwen2_5_vl.assemble_tower(source, config, TOWERS)


def assemble_sound(source: Source, config: ModelConfig) -> SoundTowerParams:
    sound, root = config.sound, present(source, ROOTS, "audio_tower.conv1.weight") + "audio_tower."
    assert sound is not None
    found = whisper.assemble_sound(source, config, root, "ln_post", places_of(sound.window, sound.hidden_size))
    return found._replace(projection=linear(source, root, "proj", bias=True))


def places_of(count: int, width: int) -> np.ndarray:
    """What each of so many places in turn adds to its state: float32 [count, width], sines and behind them cosines, the slowest of
    which go around in PERIOD places (Vaswani et al., 2017, section 3.5)."""
    half = width // 2
    slower = np.exp(np.float32(-np.log(PERIOD) / (half - 1)) * np.arange(half, dtype=np.float32))
    angles = np.arange(count, dtype=np.float32)[:, None] * slower
    return np.concatenate((np.sin(angles), np.cos(angles)), axis=1)
