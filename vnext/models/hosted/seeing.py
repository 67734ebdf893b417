"""Seeing, or hearing: models whose towers the installed transformers computes as they are, beside a decoder of ours.

The whole model's own code runs on one image or sound at a time, up to where it would give its decoder embeddings: what it puts in
the place of the input's tokens are its vectors. A model that gives its decoder more than these, or other places, is refused.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from math import isqrt
from pathlib import Path
from types import MappingProxyType
from typing import cast

import numpy as np
import torch
import transformers
from msgspec.structs import replace
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from vnext.base.installed import first_line
from vnext.models.config.folder import read_config
from vnext.models.config.json_keys import Json
from vnext.models.config.model_config import ModelConfig
from vnext.models.config.rope_config import ASKED_LENGTH, as_default, scaling_of, with_axes
from vnext.models.config.tower_config import Tower
from vnext.models.errors import ModelError
from vnext.models.hosted.family import LEFT_OUT
from vnext.models.hosted.stepping import Stepped
from vnext.models.layers.assembly import Source
from vnext.models.layers.sharding import Layout
from vnext.models.layers.tower import Parts
from vnext.models.outside import SEES, modeling, parts_seen
from vnext.models.registry import TURNING, Family, family

ROOTS = ("language_model.model.", "model.language_model.", "language_model.", "model.text_model.", "text_model.", "model.")
HEADS = ("lm_head.weight", "language_model.lm_head.weight")
HARMLESS = (bool, int, float, str)
SCALING = re.compile(r"logits?_scal|softcap")
GRID_CODE = "def get_rope_index("
"""In the code of models that give tokens of images positions of their own."""
IMPLIED: Mapping[str, Json] = MappingProxyType({"glm_ocr_text": {"attention_bias": False}})
"""What the code of a decoder says and its configuration does not, by model_type."""
NOT_SERVED = "which vnext does not serve"
PLURAL = {"image": "images", "audio": "sounds"}


# ---- the decoder -------------------------------------------------------------------------------------------------


class Rooted:
    """A source of weights under the names that they have in a model without a tower."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._root = next((root for root in ROOTS if root + "embed_tokens.weight" in source), ROOTS[0])
        self._head = next((head for head in HEADS if head in source), HEADS[0])

    def __contains__(self, name: str) -> bool:
        return str(self._named(name)) in self._source

    def __getattr__(self, name: str) -> object:
        found: object = getattr(self._source, name)
        return (lambda *given, **more: found(*map(self._named, given), **more)) if inspect.isroutine(found) else found

    def _named(self, given: object) -> object:
        if isinstance(given, tuple):
            return tuple(map(self._named, given))
        if not isinstance(given, str):
            return given
        return self._head if given == HEADS[0] else self._root + given.removeprefix("model.")


def family_of(architecture: str) -> Family:
    """The family of an architecture's decoder, for checkpoints with a tower."""
    _, decoder = parts_seen(architecture)
    own = family(decoder)

    def axes(config: ModelConfig) -> Mapping[str, Layout]:
        found: Mapping[str, Layout] = own.WEIGHT_AXES(as_decoder(config)) if callable(own.WEIGHT_AXES) else own.WEIGHT_AXES
        return found

    def assemble(source: Source, config: ModelConfig) -> object:
        return own.assemble(Rooted(source), as_decoder(config))

    return own._replace(WEIGHT_AXES=axes, parse=partial(parse, own), assemble=assemble)


def as_decoder(config: ModelConfig) -> ModelConfig:
    """The configuration as the decoder's family has it."""
    return replace(config, architecture=parts_seen(config.architecture)[1])


def parse(own: Family, raw: Json, generation: Json) -> ModelConfig:
    """The decoder's configuration by that of the whole model as transformers reads it, with what is known of the tower. Raises
    ModelError."""
    architecture = raw["architectures"][0]
    name, decoder = parts_seen(architecture)
    if decoder.startswith("Gemma"):
        raise ModelError(f"{name} has a decoder of Gemma's, which scales what it is given, {NOT_SERVED} beside another's tower")
    whole = config_of(raw)
    for key in (*raw, *(raw.get("text_config") or {}), *(raw.get("vision_config") or {}), *(raw.get("audio_config") or {})):
        raw.get(key)  # transformers has read all
    given = {key: value for key, value in whole.text_config.to_dict().items() if value is not None}
    ours = {key: value for key, value in raw.items() if key in ("dtype", "torch_dtype", ASKED_LENGTH, "tokenizer_eos_token_id")}
    tied = bool(getattr(whole, "tie_word_embeddings", False))
    usual = {"head_dim": whole.text_config.hidden_size // whole.text_config.num_attention_heads}
    usual |= IMPLIED.get(whole.text_config.model_type, {})
    given = as_default(usual | ours | given | {"architectures": [decoder], "tie_word_embeddings": tied})
    config: ModelConfig = own.parse(given, generation)
    code = modeling(str(raw["model_type"]))
    if whole.text_config.model_type in TURNING:
        pairs = int(config.head_dim * config.rope.share) // 2
        config = replace(config, rope=with_axes(config.rope, scaling_of(given), pairs))
    elif config.rope.axes and GRID_CODE not in code:  # all three of a token's positions are its place
        config = replace(config, rope=replace(config.rope, axes=()))
    elif config.rope.axes:
        raise ModelError(f"{name} turns tokens of images by their rows and columns, {NOT_SERVED} with a tower of transformers")
    if SCALING.search(code) is None:  # the whole model's head has no scale of its decoder's
        config = replace(config, form=replace(config.form, logits_scale=1.0), logits_softcap=0.0)
    tower = seeing_of if SEES in code else hearing_of
    return replace(config, architecture=architecture, tower=tower(whole, config.hidden_size, name))


def config_of(raw: Json) -> PreTrainedConfig:
    """config.json as transformers reads it. Raises ModelError."""
    left = {key: value for key, value in raw.items() if key not in LEFT_OUT and not key.startswith(("vnext", "tokenizer_eos"))}
    try:
        return transformers.CONFIG_MAPPING[str(raw["model_type"])].from_dict(left)
    except Exception as error:  # foreign code may raise anything
        raise ModelError(f"transformers {transformers.__version__} does not read this config.json: {first_line(error)}") from error


def seeing_of(whole: PreTrainedConfig, width: int, name: str) -> Tower:
    """What the scheduler knows of a tower of images: the token of vectors, and sizes by which its work is estimated."""
    vision = whole.vision_config
    patch = number(vision, 14, "patch_size")
    found = tower_of(whole, width, name, "image", vision)
    return replace(
        found,
        grid=max(number(vision, 384, "image_size") // patch, 1),
        patch=patch,
        more_tokens=tuple(getattr(whole, "visual_indicator_token_ids", ())),
    )


def hearing_of(whole: PreTrainedConfig, width: int, name: str) -> Tower:
    """The same, of a tower of sounds, as if its states lay in a square."""
    own = getattr(whole, "audio_config", None) or getattr(whole, "encoder_config", None)
    if getattr(whole, "has_lora_adapter", False):
        raise ModelError(f"{name} hears by an adapter of its own, {NOT_SERVED}")
    found = tower_of(whole, width, name, "audio", own)
    return replace(found, form="heard", grid=isqrt(number(own, 1500, "max_source_positions", "max_position_embeddings")))


def number(own: object, usual: int, *keys: str) -> int:
    """The first of these members that a configuration has."""
    found = next((value for key in keys if (value := getattr(own, key, None))), usual)
    return int(found if not isinstance(found, list | tuple) else found[0])


def tower_of(whole: PreTrainedConfig, width: int, name: str, kind: str, own: object) -> Tower:
    """What both have, by the tower's own configuration."""
    token = getattr(whole, f"{kind}_token_id", getattr(whole, f"{kind}_token_index", None))
    if not isinstance(token, int):
        raise ModelError(f"the configuration of {name} names no token that stands for {PLURAL[kind]}, {NOT_SERVED}")
    hidden = number(own, 1024, "hidden_size", "embed_dim", "d_model", "hidden_dim")
    return Tower(
        form="theirs",
        image_token=token,
        grid=1,
        patch=1,
        width=width,
        hidden_size=hidden,
        intermediate_size=number(own, 4 * hidden, "intermediate_size", "encoder_ffn_dim"),
        layer_count=number(own, 24, "num_hidden_layers", "depth", "encoder_layers", "num_layers"),
        head_count=number(own, 16, "num_attention_heads", "num_heads", "encoder_attention_heads"),
        eps=1e-6,
    )


# ---- the tower ---------------------------------------------------------------------------------------------------


class Stopped(Exception):  # noqa: N818  (no error: how a decoder's arguments come back)
    """What a model gives its decoder."""

    def __init__(self, given: dict[str, object]) -> None:
        super().__init__()
        self.given = given


class Words(nn.Module):
    """In the place of an embedding: zeros."""

    def __init__(self, width: int, dtype: torch.dtype) -> None:
        super().__init__()
        self._width, self._dtype = width, dtype

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return torch.zeros((*ids.shape, self._width), dtype=self._dtype)


class Decoder(nn.Module):
    """In the place of a decoder: it ends the call with what it is given."""

    def __init__(self, width: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.embed_tokens = Words(width, dtype)

    def get_input_embeddings(self) -> nn.Module:
        return self.embed_tokens

    def forward(self, **given: object) -> None:
        raise Stopped(given)


def without_decoder(kind: type[PreTrainedModel]) -> type[PreTrainedModel]:
    """A class of transformers that makes its models without decoder and head."""

    def make(self: PreTrainedModel, config: PreTrainedConfig) -> None:
        kind.__init__(self, config)
        decoder, stand_in = self.get_decoder(), Decoder(config.text_config.hidden_size, self.dtype)
        for name, module in list(self.named_modules()):
            if module is decoder:
                parent, _, own = name.rpartition(".")
                self.get_submodule(parent)._modules[own] = stand_in
        self._modules.pop("lm_head", None)
        self.all_tied_weights_keys = {}

    return cast(type[PreTrainedModel], type(kind.__name__, (kind,), {"__init__": make, "__module__": kind.__module__}))


class TheirTower:
    """The tower of a checkpoint."""

    def __init__(self, path: Path, config: ModelConfig, dtype: torch.dtype) -> None:
        """Raises ModelError."""
        assert config.tower is not None
        self._width, self._scale, self._dtype = config.tower.width, config.form.embedding_scale, dtype
        self._turned = config.tower.image_token if config.rope.axes else None
        self._name, _ = parts_seen(config.architecture)
        whole = config_of(read_config(path))
        try:
            with quietly():
                loaded: object = without_decoder(getattr(transformers, self._name)).from_pretrained(
                    path, config=whole, dtype=dtype, local_files_only=True, output_loading_info=True
                )
        except Exception as error:  # foreign code may raise anything
            by = f"transformers {transformers.__version__}"
            raise ModelError(f"{by} cannot load the tower of {self._name}: {first_line(error)}") from error
        model, found = cast(tuple[PreTrainedModel, dict[str, set[str]]], loaded)
        if lacking := sorted(found["missing_keys"]):
            raise ModelError(f"the checkpoint in {path} lacks {lacking[0]}, which the tower of {self._name} has")
        self._base = getattr(model.eval(), model.base_model_prefix)
        self._takes = inspect.signature(self._base.forward).parameters
        self._how, self._stepped = {name: False for name in ("use_cache",) if name in self._takes}, Stepped()

    def parts(self, tokens: np.ndarray, span: slice, given: Mapping[str, np.ndarray], rows: int = 0) -> Parts:
        """As `vectors`, part by part. An image that was computed by `vectors` before tells how many there are."""
        return self._stepped.parts(partial(self._vectors, tokens, span, given, rows), size_of(given))

    def vectors(self, tokens: np.ndarray, span: slice, given: Mapping[str, np.ndarray], rows: int = 0) -> torch.Tensor:
        """What stands for a span of an image's tokens [N], zeros but for those of vectors: [N, width]. They lie in so many
        `rows`, where the decoder turns them by rows and columns. Raises ModelError."""
        return self._stepped.whole(partial(self._vectors, tokens, span, given, rows), size_of(given))

    def count(self, tokens: np.ndarray, span: slice, given: Mapping[str, np.ndarray], rows: int = 0) -> None:
        """Learn what an image of another size costs. Raises ModelError."""
        if not self._stepped.has(size_of(given)):
            self._stepped.whole(partial(self._vectors, tokens, span, given, rows), size_of(given), counts=True)

    def products(self, size: float) -> int:
        """Multiplications for an image of which a model is given so many numbers."""
        return sum(self._stepped.work(round(size)))

    def _vectors(self, tokens: np.ndarray, span: slice, given: Mapping[str, np.ndarray], rows: int) -> torch.Tensor:
        kinds = {} if self._turned is None else {"mm_token_type_ids": (tokens == self._turned).astype(np.int64)[None]}
        tensors = {name: self._tensor(each) for name, each in (kinds | dict(given)).items() if name in self._takes}
        try:
            self._base(input_ids=torch.from_numpy(tokens)[None], **tensors, **self._how)
            raise ValueError("its decoder was given nothing")
        except Stopped as stopped:
            others = stopped.given
        except Exception as error:  # foreign code may raise anything
            raise ModelError(f"transformers cannot compute the tower of {self._name}: {first_line(error)}") from error
        found = others.pop("inputs_embeds", None)
        if self._turned is not None and not is_turned(others.pop("position_ids", None), len(tokens), span, rows):
            how = "otherwise than by rows and columns from the first one's place"
            raise ModelError(f"{self._name} turns its images' tokens {how}, {NOT_SERVED}")
        if more := sorted(name for name, each in others.items() if not is_harmless(name, each)):
            raise ModelError(f"{self._name} gives its decoder {', '.join(more)} beside the vectors of images, {NOT_SERVED}")
        has_all = isinstance(found, torch.Tensor) and found.shape == (1, len(tokens), self._width)
        if not isinstance(found, torch.Tensor) or not has_all or found[0, : span.start].any() or found[0, span.stop :].any():
            raise ModelError(f"{self._name} gives its decoder no vectors in the places of its images' tokens, {NOT_SERVED}")
        return found[0, span] * self._scale if self._scale != 1.0 else found[0, span]

    def _tensor(self, array: np.ndarray) -> torch.Tensor:
        found = torch.from_numpy(array)
        return found.to(self._dtype) if found.is_floating_point() else found


def size_of(given: Mapping[str, np.ndarray]) -> int:
    """How many numbers of an image a model is given."""
    return sum(each.size for each in given.values())


def is_turned(given: object, count: int, span: slice, rows: int) -> bool:
    """Whether positions of so many tokens are a text's, but for an image's in the span, which lie in `rows` (batch/turning.py)."""
    length = span.stop - span.start
    if not isinstance(given, torch.Tensor) or given.numel() % (3 * count) or not rows or length % rows:
        return False
    expected = np.tile(np.arange(count), (3, 1))
    down, across = np.divmod(np.arange(length), length // rows)
    expected[:, span] = span.start + np.stack((0 * down, down, across))
    expected[:, span.stop :] += max(rows, length // rows) - length
    return bool((given.reshape(-1, count).numpy() == expected).all())


def is_harmless(name: str, given: object) -> bool:
    """Whether a decoder computes the same without an argument: flags, and positions that count the tokens."""
    if isinstance(given, torch.Tensor) and name == "position_ids":
        return bool((given == torch.arange(given.shape[-1])).all())
    return given is None or isinstance(given, HARMLESS)


@contextmanager
def quietly() -> Iterator[None]:
    """Let transformers say nothing of weights that are not the tower's."""
    logging = transformers.utils.logging
    before = logging.get_verbosity()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(before)
        logging.enable_progress_bar()
