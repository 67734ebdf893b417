"""What some models' layers have beside those of a plain decoder, by its sizes, what makes of layers an encoder, and which
layers of a model there are, or who computes them."""

from __future__ import annotations

import msgspec


class Index(msgspec.Struct, frozen=True, kw_only=True):
    """What chooses the `count` keys of a longer context that a query sees: `heads` queries of `dim` numbers, whose pairs that turn
    are neighbours or halves and stand first or, with `turns_last`, last, against a key of `dim` that each token keeps beside its
    row, normed with `eps` (arXiv 2512.02556). Layers in `shared` see what the one before them has chosen."""

    heads: int
    dim: int
    count: int
    turns_neighbours: bool = False
    turns_last: bool = False
    eps: float = 1e-6
    shared: tuple[int, ...] = ()


class Latent(msgspec.Struct, frozen=True, kw_only=True):
    """Layers that keep of a token, once for all heads, `rank` numbers that its keys and values are made of and `turning` that turn
    with its position (multi-head latent attention, arXiv 2405.04434).

    A head's query is `plain` numbers and `turning` ones; its value is `value` numbers. `query_rank`: of what queries are made of, 0
    where they are made of the layer's input. `index`: what chooses keys, None where queries see all. `gate_rank`, if it is not 0:
    norms in front of attention and experts have gates of so many numbers, and queries, which are made of what comes before their
    norm too, come with gates of their values.
    """

    rank: int
    turning: int
    plain: int
    value: int
    query_rank: int = 0
    index: Index | None = None
    gate_rank: int = 0

    @property
    def width(self) -> int:
        """Numbers that a token keeps in a layer."""
        return self.rank + self.turning


class Heads(msgspec.Struct, frozen=True, kw_only=True):
    """Key-value heads of a layer, the size of its heads, and its query heads, 0 for as many as others have."""

    kv_head_count: int
    head_dim: int
    head_count: int = 0


class LayerInputs(msgspec.Struct, frozen=True, kw_only=True):
    """A table of `vocab_size` tokens with `size` numbers for each layer, which every layer adds behind its MLP."""

    size: int
    vocab_size: int


class Encoder(msgspec.Struct, frozen=True, kw_only=True):
    """A model whose tokens see all of their text, and which writes nothing. Of `positions` learned ones, the first token of a text
    has that at `first_position`. `types`: kinds of tokens, of which those behind the first `separator` have the second, where there
    is one, and all others the first. `reaches`: how many tokens each layer sees on either side, 0 for all; () where all layers do.
    """

    positions: int = 0
    first_position: int = 0
    types: int = 0
    separator: int | None = None
    reaches: tuple[int, ...] = ()


class Stage(msgspec.Struct, frozen=True, kw_only=True):
    """A run of a model's layers: stage `index` of `count`, whose first layer is `first_layer` of the whole model's, which see
    `windows`, 0 for all."""

    index: int
    count: int
    first_layer: int
    windows: tuple[int, ...]


class SharedBlocks(msgspec.Struct, frozen=True, kw_only=True):
    """`count` blocks of attention and MLP that these layers share in turn, before their own part. Each layer adds products over
    `rank` numbers to those of its block, of attention only where `adds_to_attention`."""

    layers: tuple[int, ...]
    count: int
    rank: int
    adds_to_attention: bool


class Hosted(msgspec.Struct, frozen=True, kw_only=True):
    """A model that transformers computes, by its config.json as JSON. `whole`: why ranks cannot share it, "" where they can.
    `is_biased`: keys hold what they add to scores, in full."""

    settings: str
    whole: str
    is_biased: bool = False
