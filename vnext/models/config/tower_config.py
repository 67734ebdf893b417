"""A tower: what makes vectors of images beside a decoder, as config.json describes it in vision_config."""

from __future__ import annotations

from math import isqrt
from types import MappingProxyType
from typing import Literal

import msgspec

from vnext.models.config.json_keys import Json, number, positive, refuse, required
from vnext.models.errors import ModelError

FormName = Literal["tiles", "anyres", "rows", "whole", "grid", "theirs", "heard"]
THEIRS = ("theirs", "heard")
"""Of towers that transformers computes, of images and of sounds."""


class Tower(msgspec.Struct, frozen=True, kw_only=True):
    """A vision transformer over patches of an image, and how many of its states become one vector.

    `form`: how images become inputs (media/reader.py). `image_token`: the token in whose place vectors stand. `grid`: patches along
    a side, at most; `patch`: pixels along a patch. `shuffle`: states along each side of the square that becomes a vector of `width`
    numbers; `most` squares of an image have all their vectors, 0 where no image has several. `theta`: of the rope over rows and
    columns, 0 where positions are learned. `eps`: of norms, `merger_eps` of the one behind the layers. `frames`: of a patch, all
    alike in an image. `window`: squares along each side of what layers see, 0 for all; `whole_layers` see all. `places`: learned
    positions along each side, between which those of patches lie, 0 where each patch has one. What `deep_layers` leave joins the
    first layers of the decoder. `film_token`: in whose place vectors of videos stand, 0 where none are read; `per_second`: how many
    places lie from one of their seconds to the next, 0 where texts tell times. `more_tokens`: of images, where transformers puts
    vectors, too. `marks`: the form's name for servers, where others than its own stand for images.
    """

    form: FormName
    image_token: int
    grid: int
    patch: int
    shuffle: int = 1
    most: int = 0
    width: int
    hidden_size: int
    intermediate_size: int
    layer_count: int
    head_count: int
    theta: float = 0.0
    activation: str = "gelu_tanh"
    eps: float
    merger_eps: float = 0.0
    frames: int = 1
    window: int = 0
    whole_layers: tuple[int, ...] = ()
    places: int = 0
    deep_layers: tuple[int, ...] = ()
    film_token: int = 0
    per_second: int = 0
    more_tokens: tuple[int, ...] = ()
    marks: Literal["", "omni", "capitals"] = ""

    @property
    def side(self) -> int:
        """Pixels along a side of an image."""
        return self.grid * self.patch

    @property
    def patch_size(self) -> int:
        """Numbers of a patch."""
        return 3 * self.frames * self.patch**2

    @property
    def vectors(self) -> int:
        """How many vectors an image of full size has."""
        return (self.grid // self.shuffle) ** 2

    @property
    def products(self) -> float:
        """Multiplications of the layers for an image of full size, for each of its vectors."""
        return layer_products(self, self.grid**2) / self.vectors

    @property
    def is_mutual(self) -> bool:
        """Whether an image's tokens see each other to both sides, so that a step computes all of them or none."""
        return self.form == "whole"

    @property
    def sizes(self) -> str:
        """The form of images and its numbers, for servers."""
        numbers = {
            "tiles": (self.vectors,), "anyres": (self.side, self.grid, self.most, self.film_token),
            "rows": (self.patch, self.shuffle, self.side),
            "whole": (self.side, self.vectors), "theirs": self.more_tokens, "heard": (),
            "grid": (self.patch, self.shuffle, self.side**2, self.film_token, self.per_second),
        }[self.form]  # fmt: skip
        return " ".join(map(str, (self.marks or self.form, self.image_token, *numbers)))


def parse_tower(raw: Json, width: int) -> Tower:
    """The tower of Idefics 3 in a config.json whose language part has states of `width` numbers. Raises ModelError."""
    vision = IDEFICS3 | required(raw, "vision_config", {})
    shuffle, token = positive(raw, "scale_factor", 2), positive(raw, "image_token_id", 128257)
    return siglip(vision, "tiles", token, width, shuffle)


IDEFICS3 = MappingProxyType({"image_size": 224, "patch_size": 32, "hidden_size": 1152, "num_attention_heads": 16})


def siglip(vision: Json, form: FormName, image_token: int, width: int, shuffle: int = 1, most: int = 0) -> Tower:
    """SigLIP's tower by its vision_config, with what the model adds. Raises ModelError."""
    grid = positive(vision, "image_size", 224) // positive(vision, "patch_size", 16)
    if vision.get("hidden_act", "gelu_pytorch_tanh") != "gelu_pytorch_tanh" or vision.get("num_channels", 3) != 3:
        raise ModelError("vision_config must name gelu_pytorch_tanh and 3 channels; no other tower is read")
    hidden, heads = positive(vision, "hidden_size", 768), positive(vision, "num_attention_heads", 12)
    if not grid or grid % shuffle or hidden % heads:
        raise ModelError(
            f"vision_config has {grid} patches along a side and {hidden} numbers in {heads} heads: {shuffle}, the side of the "
            "square that becomes a vector, must divide the patches, and the heads the numbers"
        )
    return Tower(
        form=form,
        image_token=image_token,
        grid=grid,
        patch=positive(vision, "patch_size", 16),
        shuffle=shuffle,
        most=most,
        width=width,
        hidden_size=hidden,
        intermediate_size=positive(vision, "intermediate_size", 3072),
        layer_count=positive(vision, "num_hidden_layers", 12),
        head_count=heads,
        eps=number(vision, "layer_norm_eps", 1e-6),
    )


def parse_anyres(raw: Json, width: int) -> Tower:
    """The tower of LLaVA-OneVision. Raises ModelError."""
    usual = {"image_size": 384, "patch_size": 14, "hidden_size": 1152, "num_attention_heads": 16, "num_hidden_layers": 26}
    vision = usual | {"intermediate_size": 4304} | required(raw, "vision_config", {})
    refuse(vision, "model_type", unless=("siglip_vision_model",))
    aspect = str(raw.get("vision_aspect_ratio", "anyres_max_9"))
    if not (most := aspect.removeprefix("anyres_max_")).isdigit() or not int(most):
        raise ModelError(f"vision_aspect_ratio {aspect!r} is not supported; supported is anyres_max_ with a number")
    tower = siglip(vision, "anyres", positive(raw, "image_token_index", 151646), width, most=int(most))
    return msgspec.structs.replace(tower, film_token=positive(raw, "video_token_index", 151647))


def parse_whole(raw: Json, width: int) -> Tower:
    """The tower of Gemma 3. Raises ModelError."""
    usual = {"image_size": 896, "patch_size": 14, "hidden_size": 1152, "num_attention_heads": 16, "num_hidden_layers": 27}
    vision = usual | {"intermediate_size": 4304} | required(raw, "vision_config", {})
    refuse(vision, "model_type", unless=("siglip_vision_model",))
    grid, count = positive(vision, "image_size") // positive(vision, "patch_size"), positive(raw, "mm_tokens_per_image", 256)
    side = isqrt(count)
    if side**2 != count or not grid or grid % side:
        raise ModelError(f"mm_tokens_per_image is {count}, no square of a number that divides the {grid} patches along a side")
    return siglip(vision, "whole", positive(raw, "image_token_index", 262144), width, grid // side)


def parse_rows(raw: Json, width: int, merger_eps: float) -> Tower:
    """The tower of Pixtral beside Mistral 3. Raises ModelError."""
    usual = {"image_size": 1540, "patch_size": 14, "hidden_size": 1024, "num_attention_heads": 16, "num_hidden_layers": 24}
    vision = usual | {"intermediate_size": 4096, "hidden_act": "gelu"} | required(raw, "vision_config", {})
    refuse(vision, "model_type", unless=("pixtral",))
    refuse(vision, "num_channels", unless=(3,))
    refuse(vision, "hidden_act", unless=("silu",))
    hidden, heads, patch = (positive(vision, key) for key in ("hidden_size", "num_attention_heads", "patch_size"))
    side, shuffle = positive(vision, "image_size"), positive(raw, "spatial_merge_size", 2)
    square = patch * shuffle
    if hidden % heads or hidden // heads % 4:
        raise ModelError(f"vision_config has {hidden} numbers in {heads} heads, which must be multiples of 4; correct config.json")
    rope: Json = vision.get("rope_parameters") or {}
    return Tower(
        form="rows",
        image_token=positive(raw, "image_token_index", 10),
        grid=-(-side // square) * shuffle,
        patch=patch,
        shuffle=shuffle,
        width=width,
        hidden_size=hidden,
        intermediate_size=positive(vision, "intermediate_size"),
        layer_count=positive(vision, "num_hidden_layers"),
        head_count=heads,
        theta=float(rope.get("rope_theta") or vision.get("rope_theta") or 10000.0),
        activation=str(vision["hidden_act"]),
        eps=1e-5,
        merger_eps=merger_eps,
    )


GRID_MAX = 128
"""Patches along a side of the largest square image that a tower without a size of its own has room for."""


def parse_grid(raw: Json, width: int) -> Tower:
    """The tower of Qwen2.5-VL. Raises ModelError."""
    usual = {"hidden_size": 3584, "intermediate_size": 3420, "depth": 32, "num_heads": 16, "patch_size": 14, "window_size": 112}
    usual |= {"spatial_merge_size": 2, "temporal_patch_size": 2, "tokens_per_second": 4}
    vision = usual | required(raw, "vision_config", {})
    refuse(vision, "hidden_act", unless=("silu",))
    refuse(vision, "in_channels", unless=(3,))
    names = ("hidden_size", "num_heads", "patch_size", "spatial_merge_size", "window_size")
    hidden, heads, patch, shuffle, window = (positive(vision, name) for name in names)
    frames = positive(vision, "temporal_patch_size")
    if hidden % heads or hidden // heads % 4 or not window // shuffle // patch or GRID_MAX % shuffle:
        raise ModelError(
            f"vision_config has {hidden} numbers in {heads} heads, windows of {window} pixels and squares of {patch * shuffle}: "
            f"heads must be multiples of 4, a window hold a square, and {shuffle} divide {GRID_MAX}; correct config.json"
        )
    return Tower(
        form="grid",
        image_token=positive(raw, "image_token_id", 151655),
        grid=GRID_MAX,
        patch=patch,
        shuffle=shuffle,
        width=width,
        hidden_size=hidden,
        intermediate_size=positive(vision, "intermediate_size"),
        layer_count=positive(vision, "depth"),
        head_count=heads,
        theta=number(vision.get("rope_parameters") or {}, "rope_theta", 10000.0),
        activation="silu",
        eps=1e-6,
        frames=frames,
        film_token=positive(raw, "video_token_id", 151656) if frames == 2 else 0,
        per_second=positive(vision, "tokens_per_second"),
        window=window // shuffle // patch,
        whole_layers=tuple(vision.get("fullatt_block_indexes", (7, 15, 23, 31))),
    )


def parse_deep_grid(raw: Json, width: int, layers: int, usual_deep: tuple[int, ...] = (8, 16, 24)) -> Tower:
    """The tower of Qwen3-VL beside a decoder, so many layers of which take in what deep ones leave. Raises ModelError."""
    usual = {"hidden_size": 1152, "intermediate_size": 4304, "depth": 27, "num_heads": 16, "patch_size": 16}
    vision = usual | {"num_position_embeddings": 2304, "hidden_act": "gelu_pytorch_tanh"} | required(raw, "vision_config", {})
    refuse(vision, "hidden_act", unless=("gelu_pytorch_tanh",))
    count, places = positive(vision, "depth"), positive(vision, "num_position_embeddings")
    deep = tuple(vision.get("deepstack_visual_indexes", usual_deep))
    if isqrt(places) ** 2 != places or list(deep) != sorted({*deep} & {*range(count)}) or len(deep) > layers:
        raise ModelError(
            f"vision_config has {places} positions, which must be a square, and deepstack_visual_indexes {deep}, which must be "
            f"numbers of its {count} layers, in order and at most {layers}; correct config.json"
        )
    found = parse_grid({**raw, "vision_config": {**vision, "hidden_act": "silu", "window_size": GRID_MAX * 64}}, width)
    return msgspec.structs.replace(
        found, activation="gelu_tanh", window=0, whole_layers=(), places=isqrt(places), deep_layers=deep, per_second=0
    )


SPAN_UNIT = 32
"""A sound takes a multiple of it in tokens, so that texts begin with a block of the cache."""
HOP = 160
"""Samples from one column of a spectrogram to the next."""


class SoundTower(msgspec.Struct, frozen=True, kw_only=True, repr_omit_defaults=True):
    """An encoder of sounds of one length: two convolutions over spectrograms of `bands`, the second one in steps of two, then
    layers over `states`. `places`: of text tokens behind a sound. `eps`: of norms. `token`: in the place of which vectors of
    `width` numbers stand, one of each two states; 0 where a text listens to what each prompt begins with. `window`: how many states
    in turn see each other alone, 0 for all.
    """

    bands: int
    states: int
    places: int = 0
    token: int = 0
    width: int = 0
    hidden_size: int
    intermediate_size: int
    layer_count: int
    head_count: int
    eps: float
    window: int = 0

    @property
    def seen(self) -> int:
        """How many states see each other."""
        return self.window or self.states

    @property
    def span(self) -> int:
        """How many tokens of a prompt stand for a sound of full length: for each of its states, and for none at the end."""
        return self.states // 2 if self.token else -(-self.states // SPAN_UNIT) * SPAN_UNIT

    @property
    def products(self) -> float:
        """Multiplications of the layers for a sound, for each token that stands for it."""
        return layer_products(self, self.seen) / self.span * (self.states / self.seen)

    @property
    def samples(self) -> int:
        """Of a sound of full length."""
        return 2 * self.states * HOP

    @property
    def leads(self) -> bool:
        """Whether each prompt begins with a sound, to which its text listens."""
        return not self.token

    @property
    def sizes(self) -> str:
        """As Tower's, of sounds; of one that leads, how many tokens stand for it, and its samples."""
        return f"{self.span} {self.samples}" if self.leads else f"sounds {self.token} {self.samples}"


def layer_products(tower: Tower | SoundTower, states: int) -> int:
    """Multiplications of a tower's layers for so many states, each of which sees all."""
    hidden = tower.hidden_size
    return tower.layer_count * states * hidden * (4 * hidden + 2 * tower.intermediate_size + 2 * states)
