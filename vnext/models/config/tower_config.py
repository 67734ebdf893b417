"""A tower: what makes vectors of images beside a decoder, as config.json describes it in vision_config."""

from __future__ import annotations

import msgspec

from vnext.models.config.json_keys import Json, number, positive, required
from vnext.models.errors import ModelError


class Tower(msgspec.Struct, frozen=True, kw_only=True):
    """A vision transformer over patches of an image, and how many of its states become one vector.

    `image_token`: the token in whose place vectors stand. `grid`: patches along a side, for which there are positions; `patch`:
    pixels along a patch. `shuffle`: states along each side of the square that becomes a vector of `width` numbers. `eps`: of norms.
    """

    image_token: int
    grid: int
    patch: int
    shuffle: int
    width: int
    hidden_size: int
    intermediate_size: int
    layer_count: int
    head_count: int
    eps: float

    @property
    def side(self) -> int:
        """Pixels along a side of an image."""
        return self.grid * self.patch

    @property
    def patch_size(self) -> int:
        """Numbers of a patch."""
        return 3 * self.patch**2

    @property
    def vectors(self) -> int:
        """How many vectors an image has."""
        return (self.grid // self.shuffle) ** 2


def parse_tower(raw: Json, width: int) -> Tower:
    """The tower of a config.json whose language part has states of `width` numbers. Raises ModelError."""
    vision: Json = required(raw, "vision_config", {})
    grid = positive(vision, "image_size", 224) // positive(vision, "patch_size", 32)
    shuffle = positive(raw, "scale_factor", 2)
    if vision.get("hidden_act", "gelu_pytorch_tanh") != "gelu_pytorch_tanh" or vision.get("num_channels", 3) != 3:
        raise ModelError("vision_config must name gelu_pytorch_tanh and 3 channels; no other tower is read")
    hidden, heads = positive(vision, "hidden_size", 1152), positive(vision, "num_attention_heads", 16)
    if not grid or grid % shuffle or hidden % heads:
        raise ModelError(
            f"vision_config has {grid} patches along a side and {hidden} numbers in {heads} heads: scale_factor {shuffle} must "
            "divide the patches, and the heads the numbers"
        )
    return Tower(
        image_token=positive(raw, "image_token_id", 128257),
        grid=grid,
        patch=positive(vision, "patch_size", 32),
        shuffle=shuffle,
        width=width,
        hidden_size=hidden,
        intermediate_size=positive(vision, "intermediate_size", 3072),
        layer_count=positive(vision, "num_hidden_layers", 12),
        head_count=heads,
        eps=number(vision, "layer_norm_eps", 1e-6),
    )


SPAN_UNIT = 32
"""A sound takes a multiple of it in tokens, so that texts begin with a block of the cache."""
HOP = 160
"""Samples from one column of a spectrogram to the next."""


class SoundTower(msgspec.Struct, frozen=True, kw_only=True):
    """An encoder of sounds of one length: two convolutions over spectrograms of `bands`, the second one in steps of two, then
    layers over `states`. `places`: of text tokens behind a sound. `eps`: of norms."""

    bands: int
    states: int
    places: int
    hidden_size: int
    intermediate_size: int
    layer_count: int
    head_count: int
    eps: float

    @property
    def span(self) -> int:
        """How many tokens of a prompt stand for a sound: for each of its states, and for none at the end."""
        return -(-self.states // SPAN_UNIT) * SPAN_UNIT

    @property
    def samples(self) -> int:
        """Of a sound of full length."""
        return 2 * self.states * HOP
