"""The tower of a model that reads images or sounds: GGUF has it in a file of its own beside the model's, mmproj-*.gguf.

Owns what the two files together say: config.json of the whole, and preprocessor_config.json. A tower of another model, or of a kind
that is not read, leaves a model of texts alone; a start then names the tensors that it leaves unread.
Source: `Keys.Clip` of the package `gguf`, and tools/mtmd/clip.cpp of llama.cpp for what a file leaves out.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from vnext.models.errors import ModelError
from vnext.models.gguf.header import Header
from vnext.models.gguf.members import Members

ARCHITECTURE = "clip"
"""llama.cpp's name of all towers."""
PIXELS = "preprocessor_config.json"
MARK = "mmproj"
"""In the names of their files."""
MERGER, BREAK = "mm.patch_merger.weight", "v.token_embd.img_break"
"""What makes one vector of a square of Mistral 3's; the model's own embedding of [IMG_BREAK], which a tower's file repeats."""
PLACES, DEEP = "v.position_embd.weight", "v.deepstack.{}.{}"
"""Learned positions; what stands behind a layer of Qwen3-VL's."""
MOMENTS = "a.position_embd.weight"
"""Positions of a sound's states."""
FRAMES, PER_SECOND, WINDOW = 2, 2, 112
"""What files of Qwen's towers leave out: the frames of a patch; of Qwen2.5-VL's the places of a second, and the pixels along each
side of what its layers see."""
Json = dict[str, object]
SIGLIP = "siglip_vision_model"


class Said(NamedTuple):
    """What a tower's file says: of config.json all that is not the text's, and preprocessor_config.json."""

    whole: Json
    form: Json


def is_tower(file: Path) -> bool:
    return MARK in file.name.lower()


def tower_beside(file: Path) -> Path | None:
    """The first tower in a model's folder, in the order of names: bfloat16 stands before the other types."""
    found = sorted(each for each in file.parent.glob("*.gguf") if is_tower(each))
    return next((each for each in found if each.name != file.name), None)


def whole_model(text: Json, model: Header, tower: Header) -> tuple[Json, Json]:
    """config.json and preprocessor_config.json of a model with the configuration `text` and of its tower; `text` and {} for a tower
    that is not its. Raises ModelError for one that is broken."""
    members = Members(tower, {})
    kind = tower.metadata.get("clip.projector_type", members.text("vision.projector_type"))
    own = PROJECTORS.get(f"{model.metadata.get('general.architecture')} {kind}")
    if members.architecture != ARCHITECTURE or own is None:
        return text, {}
    if members.number("audio.projection_dim" if own is _qwen2_audio else "vision.projection_dim") != text["hidden_size"]:
        return text, {}
    if own is _pixtral and MERGER not in members.tensors:  # Pixtral 12B, of which no square becomes one vector
        return text, {}
    whole, form = own(members, model)
    inner = {"sliding_window": None} | {name: value for name, value in text.items() if name != "architectures"}
    return {"text_config": inner, **{name: text[name] for name in ("dtype", "tie_word_embeddings")}, **whole}, _pixels(tower) | form


def _layers(members: Members, kind: str) -> int:
    """How many a tower has. Raises ModelError where there cannot be so many."""
    if (found := members.whole(f"{kind}.block_count")) > len(members.tensors):
        raise ModelError(f"the tower's file states {found} layers and has {len(members.tensors)} tensors; download it again")
    return found


def _vision(members: Members, **own: object) -> Json:
    """vision_config by what all files say, and by what else one does."""
    found: Json = {
        "image_size": members.number("vision.image_size"),
        "patch_size": members.number("vision.patch_size"),
        "hidden_size": members.number("vision.embedding_length"),
        "intermediate_size": members.number("vision.feed_forward_length"),
        "num_hidden_layers": _layers(members, "vision"),
        "num_attention_heads": members.number("vision.attention.head_count"),
        "layer_norm_eps": members.number("vision.attention.layer_norm_epsilon"),
        **({"hidden_act": "silu"} if members.flag("use_silu") else {}),
    }
    return {"vision_config": found | own}


def _gemma3(members: Members, model: Header) -> Said:
    side = members.whole("vision.image_size")
    grid, merged = side // (members.whole("vision.patch_size") or 1), members.whole("vision.projector.scale_factor", 4)
    whole: Json = {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "image_token_index": _word(model, "<image_soft_token>"),
        "mm_tokens_per_image": (grid // (merged or 1)) ** 2,
    }
    return Said(whole | _vision(members, model_type=SIGLIP), {"size": {"height": side, "width": side}})


def _idefics3(members: Members, model: Header) -> Said:
    side = members.number("vision.image_size")
    whole: Json = {
        "architectures": ["Idefics3ForConditionalGeneration"],
        "image_token_id": _word(model, "<image>"),
        "scale_factor": members.number("vision.projector.scale_factor", 2),
    }
    longest = members.number("vision.preproc_image_size", 4 * side)
    sizes: Json = {"size": {"longest_edge": longest}, "max_image_size": {"longest_edge": side}}
    return Said(whole | _vision(members, model_type=SIGLIP), sizes)


def _pixtral(members: Members, model: Header) -> Said:
    """Mistral 3, whose tower turns by rows and columns."""
    side, patch = members.number("vision.image_size"), members.number("vision.patch_size")
    whole: Json = {
        "architectures": ["Mistral3ForConditionalGeneration"],
        "image_token_index": _word(model, "[IMG]"),
        "spatial_merge_size": members.number("vision.spatial_merge_size"),
    }
    return Said(whole | _vision(members, model_type="pixtral"), {"size": {"longest_edge": side}, "patch_size": patch})


def _qwen2_5(members: Members, model: Header) -> Said:
    """Qwen2.5-VL, each n-th of whose layers sees all."""
    every = members.whole("vision.n_wa_pattern") or 1
    vision: Json = {
        "hidden_act": "silu" if members.flag("use_silu") else "gelu",
        "fullatt_block_indexes": list(range(every - 1, _layers(members, "vision"), every)),
        "window_size": members.number("vision.window_size", WINDOW),
        "tokens_per_second": PER_SECOND,
    }
    return _grid(members, model, "Qwen2_5_VLForConditionalGeneration", vision, (56**2, 3584**2))


def _qwen3(architecture: str) -> Callable[[Members, Header], Said]:
    """Qwen3-VL, or Qwen 3.5, whose tower leaves the states of its last layer alone."""

    def both(members: Members, model: Header) -> Said:
        layers = range(_layers(members, "vision"))
        vision: Json = {
            "hidden_act": "gelu_pytorch_tanh",
            "num_position_embeddings": members.shape(PLACES)[0],
            "deepstack_visual_indexes": [at for at in layers if DEEP.format(at, "norm.weight") in members.tensors],
        }
        return _grid(members, model, architecture, vision, (2**16, 2**24))

    return both


def _grid(members: Members, model: Header, architecture: str, vision: Json, usual: tuple[int, int]) -> Said:
    """What Qwen's towers have alike. `usual`: the least and the most pixels of an image of the released models, for files that do
    not say them."""
    merged = members.number("vision.spatial_merge_size", 2)
    own: Json = {
        "depth": _layers(members, "vision"),
        "num_heads": members.number("vision.attention.head_count"),
        "spatial_merge_size": merged,
        "temporal_patch_size": FRAMES,
    }
    tokens: Json = {f"{kind}_token_id": _word(model, f"<|{kind}_pad|>") for kind in ("image", "video")}
    least, most = (members.number(f"vision.image_{bound}_pixels", each) for bound, each in zip(("min", "max"), usual))
    size = {"shortest_edge": least, "longest_edge": most}
    form: Json = {"size": size, "patch_size": members.number("vision.patch_size"), "merge_size": merged}
    return Said({"architectures": [architecture]} | tokens | _vision(members, **own, **vision), form)


def _qwen2_audio(members: Members, model: Header) -> Said:
    audio: Json = {
        "num_mel_bins": members.number("audio.num_mel_bins"),
        "d_model": members.number("audio.embedding_length"),
        "encoder_ffn_dim": members.number("audio.feed_forward_length"),
        "encoder_layers": _layers(members, "audio"),
        "encoder_attention_heads": members.number("audio.attention.head_count"),
        "max_source_positions": members.shape(MOMENTS)[0],
    }
    whole: Json = {"audio_token_index": _word(model, "<|AUDIO|>"), "audio_config": audio}
    form: Json = {"feature_size": audio["num_mel_bins"]}
    return Said({"architectures": ["Qwen2AudioForConditionalGeneration"]} | whole, form)


PROJECTORS: Mapping[str, Callable[[Members, Header], Said]] = MappingProxyType(
    {
        "gemma3 gemma3": _gemma3,
        "llama idefics3": _idefics3,
        **dict.fromkeys(("llama pixtral", "mistral3 pixtral"), _pixtral),
        "qwen2vl qwen2.5vl_merger": _qwen2_5,
        "qwen3vl qwen3vl_merger": _qwen3("Qwen3VLForConditionalGeneration"),
        "qwen3vlmoe qwen3vl_merger": _qwen3("Qwen3VLMoeForConditionalGeneration"),
        "qwen35 qwen3vl_merger": _qwen3("Qwen3_5ForConditionalGeneration"),
        "qwen35moe qwen3vl_merger": _qwen3("Qwen3_5MoeForConditionalGeneration"),
        "qwen2 qwen2a": _qwen2_audio,
    }
)
"""By llama.cpp's names of the model's architecture and of what makes its vectors."""


def _word(model: Header, word: str) -> int:
    """The token of a special word. Raises ModelError."""
    tokens = model.metadata.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, list) or word not in tokens:
        raise ModelError(f"the model's vocabulary has no {word!r}, in whose place its tower's vectors stand; move the tower away")
    return tokens.index(word)


def _pixels(tower: Header) -> Json:
    """What numbers become of, where the file says it."""
    found = {name: tower.metadata.get(f"{ARCHITECTURE}.vision.{name}") for name in ("image_mean", "image_std")}
    return {name: list(numbers) for name, numbers in found.items() if isinstance(numbers, array)}
