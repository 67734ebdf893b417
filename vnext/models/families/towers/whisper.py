"""Whisper: encoder of sounds, decoder."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from types import MappingProxyType

import msgspec
import numpy as np

from vnext.kernels.arrays import Array
from vnext.models.config.json_keys import Json, flag, positive, refuse
from vnext.models.config.model_config import PLAIN_ACTIVATIONS, ModelConfig, activation, common_config
from vnext.models.config.tower_config import SoundTower
from vnext.models.errors import ModelError
from vnext.models.layers.assembly import Source, embeddings, layer_norm, linear, plain_mlp
from vnext.models.layers.decoder import logits
from vnext.models.layers.layers import Attention, Linear
from vnext.models.layers.listener import ListenerLayer, ListenerParams, Listening, forward
from vnext.models.layers.sharding import WEIGHT_AXES as LLAMA, Axis, Layout, Sized, matrix
from vnext.models.layers.tower import KERNEL, SoundTowerParams, TowerLayer

__all__ = ["WEIGHT_AXES", "assemble", "assemble_tower", "forward", "logits", "parse", "tower_config"]

DECODER, ENCODER = "model.decoder.", "model.encoder."
NORM = Layout((Axis.HIDDEN,))
NAMES = MappingProxyType(
    {
        **LLAMA,
        "out_proj": matrix(Axis.HIDDEN, Axis.HEADS),
        "fc1": matrix(Axis.MLP, Axis.HIDDEN),
        "fc2": matrix(Axis.HIDDEN, Axis.MLP),
        "proj_out": matrix(Axis.VOCAB, Axis.HIDDEN),
        **dict.fromkeys(("self_attn_layer_norm", "encoder_attn_layer_norm", "final_layer_norm", "layer_norm"), NORM),
    }
)
EPS = 1e-5
DIVIDED = "which the numbers of attention heads must divide; correct config.json"
DEFAULTS = MappingProxyType({"tie_word_embeddings": True, "activation_function": "gelu"})


def WEIGHT_AXES(config: ModelConfig) -> Mapping[str, Layout]:  # noqa: N802  (a field of Family)
    sound = config.sound
    assert sound is not None
    return {**tower_axes(sound), "decoder.embed_positions": Layout((Sized(sound.places),), Axis.HIDDEN)}


def tower_axes(sound: SoundTower) -> dict[str, Layout]:
    """The layouts of an encoder's weights, among Llama's."""
    return {
        **NAMES,
        "conv1": Layout((Axis.HIDDEN,), Sized(sound.bands * KERNEL), kernel=(KERNEL,)),
        "conv2": Layout((Axis.HIDDEN,), Sized(sound.hidden_size * KERNEL), kernel=(KERNEL,)),
        "embed_positions": Layout((Sized(sound.states),), Axis.HIDDEN),
    }


def parse_sound(raw: Json) -> SoundTower:
    """An encoder by its members of a config.json. Raises ModelError."""
    refuse(raw, "scale_embedding", unless=(False,))
    if activation(raw, "activation_function", PLAIN_ACTIVATIONS) != "gelu":
        raise ModelError(f"activation_function {raw['activation_function']!r} is not supported; supported is gelu")
    found = SoundTower(
        bands=positive(raw, "num_mel_bins", 80),
        states=positive(raw, "max_source_positions", 1500),
        hidden_size=positive(raw, "d_model"),
        intermediate_size=positive(raw, "encoder_ffn_dim"),
        layer_count=positive(raw, "encoder_layers"),
        head_count=positive(raw, "encoder_attention_heads"),
        eps=EPS,
    )
    if found.hidden_size % found.head_count:
        raise ModelError(f"d_model is {found.hidden_size}, {DIVIDED}")
    return found


def parse(raw: Json, generation: Json) -> ModelConfig:
    """The configuration, from Whisper's own names. Raises ModelError."""
    raw = DEFAULTS | raw
    refuse(raw, "use_weighted_layer_sum", unless=(False,))
    sound = msgspec.structs.replace(parse_sound(raw), places=positive(raw, "max_target_positions", 448))
    hidden = sound.hidden_size
    named = {
        "hidden_size": hidden,
        "num_attention_heads": positive(raw, "decoder_attention_heads"),
        "num_hidden_layers": positive(raw, "decoder_layers"),
        "intermediate_size": positive(raw, "decoder_ffn_dim"),
        "max_position_embeddings": sound.span + sound.places,
        "rms_norm_eps": EPS,
        "tie_word_embeddings": flag(raw, "tie_word_embeddings"),
    }
    if hidden % named["num_attention_heads"]:
        raise ModelError(f"d_model is {hidden}, {DIVIDED}")
    config = common_config(raw | named, generation, activation="gelu")
    return msgspec.structs.replace(config, sound=sound, attention_bias=True, mlp_bias=True)


def assemble(source: Source, config: ModelConfig) -> ListenerParams:
    def layer(index: int) -> ListenerLayer:
        here = f"{DECODER}layers.{index}."
        heard = here + "encoder_attn."
        listening = Listening(
            linear(source, heard, "q_proj", bias=True),
            Linear(weights(source, heard, "k_proj", "v_proj"), keyless_bias(source, heard, "k_proj", "v_proj")),
            linear(source, heard, "out_proj", bias=True),
        )
        return ListenerLayer(
            layer_norm(source, here + "self_attn_layer_norm"), attention_of(source, here),
            layer_norm(source, here + "encoder_attn_layer_norm"), listening,
            layer_norm(source, here + "final_layer_norm"), plain_mlp(source, here, "fc1", "fc2", bias=True),
        )  # fmt: skip

    layers = tuple(layer(index) for index in config.layer_numbers)
    embedding, head = embeddings(source, config, DECODER + "embed_tokens.weight", "proj_out.weight")
    return ListenerParams(
        embedding=embedding,
        places=source.fused((DECODER + "embed_positions.weight",)),
        layers=layers,
        norm=layer_norm(source, DECODER + "layer_norm"),
        head=head,
    )


def tower_config(config: ModelConfig) -> ModelConfig:
    """The encoder as a model of its own, whose weights every rank has whole."""
    sound = config.sound
    assert sound is not None
    return msgspec.structs.replace(
        config, intermediate_size=sound.intermediate_size, layer_count=sound.layer_count, head_count=sound.head_count,
        kv_head_count=sound.head_count, head_dim=sound.hidden_size // sound.head_count, position_count_max=sound.states,
    )  # fmt: skip


def assemble_tower(source: Source, config: ModelConfig) -> SoundTowerParams:
    return assemble_sound(source, config, ENCODER)


def assemble_sound(
    source: Source, config: ModelConfig, root: str, norm_name: str = "layer_norm", turned: np.ndarray | None = None
) -> SoundTowerParams:
    """The parameters of the encoder under `root`, which ends with a dot. `turned`: positions float32 [N, hidden] that no checkpoint
    has."""

    def layer(index: int) -> TowerLayer:
        here = f"{root}layers.{index}."
        return TowerLayer(
            layer_norm(source, here + "self_attn_layer_norm"), attention_of(source, here),
            layer_norm(source, here + "final_layer_norm"), plain_mlp(source, here, "fc1", "fc2", bias=True),
        )  # fmt: skip

    first = linear(source, root, "conv1", bias=True)
    if turned is None:
        positions = source.fused((root + "embed_positions.weight",))
    else:
        like = getattr(first.bias, "new_tensor", partial(np.asarray, dtype=source.dtype))
        positions = like(turned)
    return SoundTowerParams(
        first=first,
        second=linear(source, root, "conv2", bias=True),
        positions=positions,
        layers=tuple(layer(index) for index in config.layer_numbers),
        norm=layer_norm(source, root + norm_name),
    )


def attention_of(source: Source, here: str) -> Attention:
    """The self-attention of the layer at `here`."""
    own, names = here + "self_attn.", ("q_proj", "k_proj", "v_proj")
    return Attention(
        Linear(weights(source, own, *names), keyless_bias(source, own, *names)), linear(source, own, "out_proj", bias=True)
    )


def weights(source: Source, here: str, *modules: str) -> object:
    """The modules' weights, one below the other, packed."""
    return source.packed(tuple(f"{here}{module}.weight" for module in modules))


def keyless_bias(source: Source, here: str, *modules: str) -> Array:
    """The modules' biases, one behind the other; k_proj has none, in whose place are zeros."""
    has = [[float(module != "k_proj")] for module in modules]
    given = source.fused(tuple(f"{here}{module.replace('k_proj', 'v_proj')}.bias" for module in modules)).reshape(len(modules), -1)
    counts = given.new_tensor(has) if hasattr(given, "new_tensor") else np.array(has, dtype=source.dtype)
    return (given * counts).reshape(-1)
