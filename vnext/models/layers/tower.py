"""The tower: pixels of one image in, vectors out; each patch sees all of the image, which is computed alone.

Owns the order of operations. Products, norms and attention are the decoders': patches are rows of one token each over a cache that
holds one layer's keys and values of one image. No image's bits depend on others.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import numpy as np

from vnext.kernels.arrays import Array, as_tensor
from vnext.models.config.model_config import ModelConfig
from vnext.models.config.tower_config import SoundTower, Tower
from vnext.models.layers.batch import ForwardBatch, HostBatch
from vnext.models.layers.both_sides import ByToken
from vnext.models.layers.kv_cache import KvCache
from vnext.models.layers.layers import (
    Attention,
    GatedMlp,
    LayerNorm,
    Linear,
    Norm,
    PlainMlp,
    Step,
    layer_steps,
    mlp,
    norm_of,
    read,
    row,
    written,
)
from vnext.models.layers.sharding import alone

if TYPE_CHECKING:
    import torch

BLOCK_SIZE = 16
ALL, NO_BAND = slice(None), 1 << 62


def own_config(config: ModelConfig, tower: Tower | SoundTower, activation: str, positions: int) -> ModelConfig:
    """A tower as a model of its own, whose weights every rank has whole: of the decoder's form it has nothing."""
    return msgspec.structs.replace(
        config, hidden_size=tower.hidden_size, intermediate_size=tower.intermediate_size, layer_count=tower.layer_count,
        head_count=tower.head_count, kv_head_count=tower.head_count, head_dim=tower.hidden_size // tower.head_count,
        rms_norm_eps=tower.eps, activation=activation, windows=(), stage=None, position_count_max=positions, query_scale=None,
        attention_softcap=0.0, local_rope=None, form=type(config.form)(), recurrent=None, experts=None,
    )  # fmt: skip


class TowerLayer(NamedTuple):
    """Norms stand before attention and MLP."""

    attention_norm: Norm
    attention: Attention
    mlp_norm: Norm
    mlp: PlainMlp | GatedMlp


class TowerParams(NamedTuple):
    """`patches` makes a state of a patch's numbers, colour by colour and row by row; `positions` [N, hidden] are learned ones, None
    where patches turn; `before` and `norm` stand before and behind the layers; `projection`: what the family makes vectors with."""

    patches: Linear
    layers: tuple[TowerLayer, ...]
    projection: Any
    positions: Array | None = None
    before: Norm | None = None
    norm: Norm | None = None


class Passing(NamedTuple):
    """An image on its way through a tower: states [N, rows * columns, hidden] of N images of one size, computed one by one, and the
    step of their layers. `windows` int64: how many states there are in each of those that some layers see, in their order.
    `kept`: states as the tower's deep layers left them."""

    states: torch.Tensor
    step: Step
    rows: int
    columns: int
    windows: np.ndarray | None = None
    kept: tuple[torch.Tensor, ...] = ()


def begin(params: TowerParams, kv: KvCache, pixels: torch.Tensor, config: ModelConfig) -> Passing:
    """Images float32 [N, 3, height, width] of one size, or the frames of one patch, before the first layer; `kv` is a cache for the
    patches of one and one layer, used up."""
    tower = config.tower
    assert tower is not None
    patch, (count, _, height, width) = tower.patch, pixels.shape
    rows, columns = height // patch, width // patch
    step, order, windows = step_of_all(kv, rows * columns, config), None, None
    if tower.form == "grid":
        order, windows = patch_order(rows, columns, tower.shuffle, tower.window)
    if tower.theta:
        cosine, sine = turned(rows, columns, config.head_dim, tower.theta, order)
        step = step._replace(cosine=cosine, sine=sine)
    frames = tower.frames if count == tower.frames else 1
    count //= frames
    cut = pixels.reshape(count, frames, 3, rows, patch, columns, patch).permute(0, 3, 5, 2, 1, 4, 6)
    cut = cut.reshape(-1, 3, frames, patch**2).expand(-1, -1, tower.frames, -1).reshape(-1, tower.patch_size)
    if order is not None:
        cut = cut.unflatten(0, (count, -1))[:, order].flatten(0, 1)
    states = step.operations.linear(cut.to(kv[0][0].dtype).contiguous(), *params.patches)
    states = norm_of(states, params.before, step).unflatten(0, (count, -1))
    if params.positions is not None and tower.places:
        states = states + between(params.positions, rows, columns, tower.places)[order].to(states.dtype)
    elif params.positions is not None:
        places = place_numbers(rows) if tower.form == "tiles" else np.arange(rows * columns)
        states = states + params.positions.index_select(0, as_tensor(places))
    return Passing(states, step, rows, columns, windows if tower.window else None)


Windows = np.ndarray | None
Parts = Generator[int, None, Any]
"""A computation that stops behind each of its parts, all of about the same cost, where it says how many there are, and ends with
what it has computed."""


def encode(params: TowerParams, kv: KvCache, pixels: torch.Tensor, config: ModelConfig, units: int = 1) -> Parts:
    """A Passing of images, as for `begin`, behind the last layer and its norm; layer by layer, in about so many `units`."""
    passing = begin(params, kv, pixels, config)
    layers, (images, states, _) = len(params.layers), passing.states.shape
    band = band_of(states, (units - 1) // (layers * images))
    count = 1 + layers * images * parts_of(states, band)
    yield count
    for at, layer in enumerate(params.layers):
        windows = None if config.tower is None or at in config.tower.whole_layers else passing.windows
        for each in passing.states:
            for _ in through((layer,), each, kv, passing.step, band, windows):
                yield count
        if config.tower is not None and at in config.tower.deep_layers:
            passing = passing._replace(kept=(*passing.kept, passing.states.clone()))
    return end(params, passing)


def end(params: TowerParams, passing: Passing) -> Passing:
    """Images behind the last norm."""
    count, (_, _, hidden) = len(passing.states), passing.states.shape
    states = norm_of(passing.states.reshape(-1, hidden), params.norm, passing.step)
    return passing._replace(states=states.reshape(count, -1, hidden))


KEYS = 4
"""Bands of states whose keys and values cost about as much as what one band becomes with them."""


def band_of(states: int, parts: int) -> int:
    """The states of a band, with which a layer has about so many parts."""
    return -(-states // max(KEYS * parts // (KEYS + 1), min(parts, 2), 1))


def parts_of(states: int, band: int) -> int:
    return 1 if band >= states else -(-states // band) + -(-states // (KEYS * band))


def bands(states: int, band: int) -> list[slice]:
    return [slice(first, min(first + band, states)) for first in range(0, states, band)]


def through(
    layers: Sequence[TowerLayer], states: torch.Tensor, kv: KvCache, step: Step, band: int = NO_BAND, windows: Windows = None
) -> Parts:
    """States [N, hidden], changed as the layers leave them, before any last norm. A layer's keys and values come first, of KEYS
    bands in a part, then what it makes of its states, a `band` of them in a part: none depends on which others are computed with
    it. `windows`: as Passing."""
    count = len(states)
    is_cut = band < count
    for layer in layers:
        queries = None
        for span in bands(count, KEYS * band):
            qkv = step.operations.linear(norm_of(states[span], layer.attention_norm, step), *layer.attention.qkv)
            found = written(qkv, layer.attention, kv[0], of_span(step, span))
            if queries is None:
                queries = found if len(found) == count else found.new_empty((count, *found.shape[1:]))
            if queries is not found:
                queries[span] = found
            if is_cut:
                yield 0
        assert queries is not None
        for span in bands(count, band):
            own = step_of_all(kv, count, step.config, span, windows) if is_cut or windows is not None else step
            near = states[span] + row(read(queries[span], kv[0], own), layer.attention.output, own)
            states[span] = near + mlp(layer.mlp, norm_of(near, layer.mlp_norm, own), own)
            yield 0
    return states


def of_span(step: Step, span: slice) -> Step:
    """The step as keys and values of some states are written."""
    cosine, sine = (None if each is None else each[span] for each in (step.cosine, step.sine))
    return step._replace(slots=step.slots[span], cosine=cosine, sine=sine)


def whole(parts: Parts) -> Any:
    """What the parts compute, without a stop."""
    while True:
        try:
            next(parts)
        except StopIteration as end:
            return end.value


def turned(
    rows: int, columns: int, head_dim: int, theta: float, order: np.ndarray | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosine and sine over rows and columns: pairs of a head turn by row and by column, every other frequency each; of patches in
    an `order` of their own both by the first ones."""
    frequencies = (1.0 / theta ** (np.arange(0, head_dim, 2, dtype=np.float32) / head_dim)).astype(np.float32)
    down = np.repeat(np.arange(rows, dtype=np.float32), columns)[:, None] * frequencies[0::2]
    across = np.tile(np.arange(columns, dtype=np.float32), rows)[:, None] * frequencies[order is None :: 2]
    angles = np.concatenate((down, across), axis=1).astype(np.float64)[ALL if order is None else order]
    return as_tensor(np.cos(angles).astype(np.float32)), as_tensor(np.sin(angles).astype(np.float32))


def squares(passing: Passing, by: int) -> torch.Tensor:
    """States of each square of by * by patches side by side, row by row: [N, squares, by * by, hidden]."""
    count, _, hidden = passing.states.shape
    cut = passing.states.reshape(count, passing.rows // by, by, passing.columns // by, by, hidden)
    return cut.permute(0, 1, 3, 2, 4, 5).reshape(count, -1, by * by, hidden)


def between(positions: torch.Tensor, rows: int, columns: int, side: int) -> torch.Tensor:
    """Of positions [side * side, hidden] those of an image's patches row by row, float32: each between the four around it, those at
    its corners as they are."""

    def along(count: int) -> tuple[np.ndarray, np.ndarray]:
        at = np.arange(count, dtype=np.float32) * np.float32(side - 1) / np.float32(max(count - 1, 1))
        low = np.floor(at)
        return np.minimum(np.stack((low, low + 1)).astype(np.int64), side - 1), np.stack((1 - (at - low), at - low))

    (down, above), (across, before) = along(rows), along(columns)
    found = positions.new_zeros((rows * columns, positions.shape[1])).float()
    for at, share in zip(down, above):
        for place, part in zip(across, before):
            weights = as_tensor((share[:, None] * part).astype(np.float32).reshape(-1, 1))
            found = found + positions.index_select(0, as_tensor((at[:, None] * side + place).reshape(-1))).float() * weights
    return found


def square_order(rows: int, columns: int, window: int) -> tuple[np.ndarray, list[int]]:
    """Squares of an image by their numbers row by row, int64 [rows * columns], window by window, and how many each window has."""
    numbers, step = np.arange(rows * columns).reshape(rows, columns), window or max(rows, columns)
    found = [
        numbers[down : down + step, across : across + step].reshape(-1)
        for down in range(0, rows, step) for across in range(0, columns, step)
    ]  # fmt: skip
    return np.concatenate(found), [len(each) for each in found]


def patch_order(rows: int, columns: int, by: int, window: int) -> tuple[np.ndarray, np.ndarray]:
    """Patches of an image by their numbers row by row, int64 [rows * columns], square by square of by * by patches, in the order of
    these, and how many each window has, int64."""
    squares, counts = square_order(rows // by, columns // by, window)
    down, across = np.divmod(squares, columns // by)
    inside = np.arange(by)[:, None] * columns + np.arange(by)
    return ((down * columns + across)[:, None] * by + inside.reshape(-1)).reshape(-1), np.array(counts) * by**2


def place_numbers(grid: int) -> np.ndarray:
    """Which position each patch has (int64 [grid * grid]): the authors' float32 fractions decide, which are not exact."""
    step = np.float32(1.0) / np.float32(grid)
    bounds = (1 / grid + np.arange(grid - 1) * (1 / grid)).astype(np.float32)
    along = np.minimum(np.arange(grid, dtype=np.float32) * step, np.float32(1.0 - 1e-6))
    found = np.searchsorted(bounds, along, side="right")
    numbers: np.ndarray = (found[:, None] * grid + found[None, :]).reshape(-1).astype(np.int64)
    return numbers


def page_count(patches: int) -> int:
    """Blocks of a cache for one image, or one sound."""
    return -(-patches // BLOCK_SIZE)


def step_of_all(kv: KvCache, patches: int, config: ModelConfig, span: slice = ALL, windows: Windows = None) -> Step:
    """A step of one row for each patch of the `span`, which sees all patches, or those of its window; layers are all alike."""
    at = np.arange(patches, dtype=np.int64)[span]
    starts, contexts = np.arange(len(at) + 1, dtype=np.int32), np.full(len(at), patches, dtype=np.int32)
    table = np.tile(np.arange(page_count(patches), dtype=np.int32), (len(at), 1))
    places, (begins, lengths, blocks) = as_tensor(at), map(as_tensor, (starts, contexts, table))
    batch = ForwardBatch(places, places, places, begins, lengths, blocks, places[:0], HostBatch(starts, contexts))
    step = layer_steps(kv, batch, config, alone(), None)[0]
    if windows is None:
        return step
    ends, sizes = (np.repeat(each, windows)[span] for each in (np.cumsum(windows), windows))
    attend = ByToken(step.operations, batch, (BLOCK_SIZE, kv[0][0].shape[1]), ends, sizes)
    return step._replace(operations=step.operations._replace(paged_attention=attend))


# ---- the tower of sounds -----------------------------------------------------------------------------------------
# A spectrogram of one sound in, states out; each state sees all of the sound, which is computed alone: no sound's bits depend on
# others. A convolution is a product of each place's neighbours, laid side by side.

KERNEL = 3
"""Columns that a convolution looks at: one on either side."""


class SoundTowerParams(NamedTuple):
    """`first` and `second` are the convolutions, over bands and over channels, as products [hidden, channels * KERNEL]; `positions`
    [N, hidden]. `projection` makes vectors of two states each, by their mean; None where a text listens to states."""

    first: Linear
    second: Linear
    positions: Array
    layers: tuple[TowerLayer, ...]
    norm: LayerNorm
    projection: Linear | None = None


def listen(params: SoundTowerParams, kv: KvCache, spectrogram: torch.Tensor, config: ModelConfig, units: int = 1) -> Parts:
    """States [span, hidden] of one sound, float32 [bands, 2 * states], in parts as tower.encode; zeros behind the last one. Or its
    vectors [states // 2, width], of a spectrogram that may end with one column more; of one that is heard by windows, each of which
    is computed alone, with one less. `kv` is a cache for the states that see each other and one layer, used up."""
    sound, columns = config.sound, spectrogram.shape[1]
    assert sound is not None
    windows, done = spectrogram.split(2 * sound.window or columns, 1), 0
    sizes = [(each.shape[1] + (sound.window > 0)) // 2 for each in windows]
    band = band_of(sizes[0], (units - 1) // (len(params.layers) * len(windows)))
    count = 1 + len(params.layers) * sum(parts_of(size, band) for size in sizes)
    yield count
    found = params.positions.new_empty((sum(sizes), params.positions.shape[1]))
    for window, states in zip(windows, sizes):
        step = step_of_all(kv, states, config)
        chosen, hidden = step.operations, window.T.to(params.positions.dtype)
        for layer, stride in ((params.first, 1), (params.second, 2)):
            hidden = chosen.activate(chosen.linear(neighbours(hidden, stride), *layer), None, None, "gelu")
        hidden = hidden[:states] + params.positions[:states]
        for _ in through(params.layers, hidden, kv, step, band):
            yield count
        found[done : done + states] = hidden
        done += states
    if params.projection is not None:
        pairs = found[: done // 2 * 2].unflatten(0, (-1, 2)).float()
        means = ((pairs[:, 0] + pairs[:, 1]) / 2).to(found.dtype)
        return chosen.linear(norm_of(means, params.norm, step), *params.projection)
    room = found.new_zeros((sound.span, found.shape[1]))
    room[:done] = norm_of(found, params.norm, step)
    return room


def neighbours(columns: torch.Tensor, stride: int) -> torch.Tensor:
    """Of every `stride`-th of N columns [N, channels] the KERNEL around it, zeros beyond the ends: [N / stride, channels *
    KERNEL], channel by channel."""
    room = columns.new_zeros((len(columns) + KERNEL - 1, columns.shape[1]))
    room[1 : len(columns) + 1] = columns
    return room.unfold(0, KERNEL, stride).flatten(1).contiguous()
