"""Formats: what a kind of weight says of itself, from a checkpoint's tensors to the products. The values of --quantization.

A format is a row here and a file of formats/ with one object, which holds no state and which every weight of the kind carries.
Loaders, packed files, sizes and operations ask the object and compare no names. Settings import this file, so it imports a
format's file only on use.

    checkpoint     `tensors` names what holds a weight, `slices` cuts a rank's part out of it, `to_float` is the plain reference and
                   `codes` what stays in memory where the kernels multiply by it
    loading        `rounds` is the format to which floats are rounded
    CPU kernels    `panels` is the kind of panels that they pack and multiply by (kernels/cpu/linear.py)
    plain torch    `formed` gives the weight that it multiplies by
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from importlib import import_module
from operator import attrgetter
from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    import numpy as np
    import torch

    from vnext.kernels.codes import Codes

Shape = tuple[int, ...]
Cut = tuple["slice | np.ndarray", ...]
"""Of a tensor by numpy: slices, or places along an axis."""
Settings = Mapping[str, object]
"""What a checkpoint says of its quantised weights, {} for nothing."""


class PlainWeight(Protocol):
    """A weight [..., out, in] as plain torch multiplies by it, where that is no tensor. Its dtype is that of activations."""

    @property
    def shape(self) -> Shape: ...

    @property
    def dtype(self) -> torch.dtype: ...

    def __getitem__(self, expert: int) -> PlainWeight:
        """One expert of [E, out, in]."""

    def sums(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, in] times the weight -> [T, out]: in x's dtype, or in float32 where the product is summed so."""

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        """Rows `ids` int64 [N] of a weight [out, in] -> [N, in] of its dtype."""


class StoredTensors(Protocol):
    """A checkpoint, as formats look in it for their weights."""

    @property
    def settings(self) -> Settings: ...

    def stored_dtype(self, name: str) -> str:
        """A tensor's dtype by its file's own name for it, "" where there is no such tensor."""

    def shape(self, name: str) -> Shape | None:
        """A tensor's whole shape, None where there is no such tensor."""

    def values(self, name: str) -> np.ndarray:
        """A whole tensor, which is small, copied."""


class Format:
    """A kind of weight [out, in]. The defaults are those of floats in one tensor, kept as they are. Dtypes are names."""

    name = ""
    dtypes: tuple[str, ...] = ()
    """The dtypes of `tensors` in checkpoints that hold such weights, by the files' names; () for a kind that is made of floats."""
    group = 1
    """Neighbouring inputs that share a scale: a weight is made of whole groups, and so is each shard that is made at loading."""
    has_codes = False
    """Whether `codes` gives the numbers that a checkpoint has."""
    has_one_form = False
    """Whether the codes of all weights are of one form but for their shape."""

    # ---- in a checkpoint

    def found(self, weight: str, tensors: StoredTensors) -> Format | None:
        """The format with the parameters of the weight of this name, None where `tensors` hold it otherwise. Raises ValueError,
        which says why, where they hold it so and it cannot be read."""
        dtypes = tuple(tensors.stored_dtype(each) for each in self.tensors(weight))
        return self if self.dtypes and dtypes == self.dtypes else None

    def tensors(self, weight: str) -> tuple[str, ...]:
        """The tensors that hold the weight of this name, "....up_proj.weight"."""
        return (weight,)

    def shapes(self, shape: Shape) -> tuple[Shape, ...]:
        """The whole shapes of `tensors` for a weight of this whole shape. Raises ValueError, which says why, where none fits."""
        return (shape,)

    def slices(self, rows: slice, columns: slice) -> tuple[Cut, ...]:
        """What of `tensors` holds these outputs and inputs, both with a start and a stop. Raises ValueError, which says why, where
        what shares a scale would be divided."""
        return ((rows, columns),)

    def to_float(self, part: tuple[np.ndarray, ...]) -> np.ndarray:
        """The numbers that such slices of `tensors` stand for, [out, in] in the tensors' own dtype or in float32."""
        return part[0]

    def codes(self, part: tuple[np.ndarray, ...]) -> Codes:
        """The same numbers as whole ones of few bits, exactly; only where `has_codes`. Both raise ValueError, which says why, for
        numbers that are not finite."""
        raise ValueError(f"{self.name} has no codes")

    # ---- in memory

    keeps_codes = False
    """Whether weights that a checkpoint holds in a format with codes stay what they are."""

    def rounds(self, held: Format, inputs: int, run: int, takes_few: bool) -> Format | None:
        """The format in which a weight without codes that a checkpoint holds in the format `held` counts as held, where loading
        rounds it. Of its `inputs` each `run` are summed alone. `takes_few`: it bears the fewest bits, being neither
        the head's nor what makes values."""
        return None

    def panels(self, dtype: str) -> str:
        """The kind of the CPU kernels' panels for floats of this dtype, by its name in kernels/cpu/native.py; "" where they have
        none: plain torch multiplies."""
        return ""

    def formed(self, weight: torch.Tensor) -> PlainWeight | torch.Tensor:
        """The weight [..., out, in], floats, as plain torch multiplies by it."""
        return weight


class FormatRow(NamedTuple):
    """`place`: the format's object, "module:name". `option`: what --quantization's help says of it, "" where it is no value of it.
    `dtype`: the only one that models with it compute in, "" for any. `devices`: the kinds that serve it. `is_stored`: checkpoints
    hold such weights, which are found by their tensors."""

    name: str
    place: str
    option: str = ""
    is_stored: bool = False
    dtype: str = ""
    devices: tuple[str, ...] = ("cpu", "cuda")


GGUF_BLOCKS = (
    "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "TQ1_0", "TQ2_0", "IQ4_NL", "IQ4_XS", "MXFP4",
    "IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S",
)  # fmt: skip
FORMATS = {
    row.name: row
    for row in (
        FormatRow("plain", "vnext.kernels.formats.floats:PLAIN"),
        FormatRow(
            "int8", "vnext.kernels.formats.rounded:INT8", dtype="bfloat16", devices=("cpu",),
            option="int8 rounds weights to 8 bits as they are loaded, with a scale for 32 inputs: half the memory",
        ),
        FormatRow(
            "int4", "vnext.kernels.formats.rounded:INT4", dtype="bfloat16", devices=("cpu",),
            option="int4 rounds those of layers to 4 bits, by a searched scale, and values and others as int8",
        ),
        FormatRow("wide", "vnext.kernels.formats.floats:WIDE"),
        FormatRow("fixed", "vnext.kernels.formats.floats:FIXED"),
        FormatRow(
            "codes", "vnext.kernels.formats.floats:CODES",
            option="codes keeps the few bits of a quantised checkpoint, on a GPU 4, and multiplies by them; none makes floats of "
            "them; auto is codes on a CPU in bfloat16, else none",
        ),
        *(FormatRow(name, f"vnext.kernels.formats.gguf_blocks:BLOCKS.{name}", is_stored=True) for name in GGUF_BLOCKS),
        FormatRow("awq", "vnext.kernels.formats.integers:AWQ", is_stored=True),
        FormatRow("gptq", "vnext.kernels.formats.integers:GPTQ", is_stored=True),
        FormatRow("pack-quantized", "vnext.kernels.formats.integers:PACKED", is_stored=True),
        FormatRow("torchao-int4", "vnext.kernels.formats.torchao:TORCHAO_INT4", is_stored=True),
        FormatRow("scaled", "vnext.kernels.formats.scaled:SCALED", is_stored=True),
        FormatRow("float4", "vnext.kernels.formats.float4:FLOAT4_FORMAT", is_stored=True),
        FormatRow("bitsandbytes", "vnext.kernels.formats.bitsandbytes:BITSANDBYTES", is_stored=True),
    )
}  # fmt: skip
"""By name; the first is the default. Those of GGUF_BLOCKS have llama.cpp's names of types."""
NO_FORMAT, AUTO, CODES = "none", "auto", "codes"
QUANTIZATIONS = (AUTO, NO_FORMAT, *(row.name for row in FORMATS.values() if row.option))
"""The values of --quantization."""
INT8, BF16 = "int8", "bf16"
ACTIVATIONS = (AUTO, INT8, BF16)
"""What activations become before weights of few bits are multiplied by them (codes.py): the values of --activations."""
QUANTIZATION_HELP = "; ".join(row.option for row in FORMATS.values() if row.option)


class WeightFormats(NamedTuple):
    """The formats of a model's weights: of those that each step reads whole, and of those that stay `exact`. `activations`: what
    these become where codes are multiplied by them."""

    products: Format
    exact: Format
    activations: str = INT8


def format_of(name: str) -> Format:
    """The format of this name. Raises ValueError for a name that the table lacks."""
    if name not in FORMATS:
        raise ValueError(f"the format {name!r} of a weight is not known; there are: {', '.join(FORMATS)}")
    return _object_at(FORMATS[name].place)


@cache
def _object_at(place: str) -> Format:
    module, _, attribute = place.partition(":")
    found: Format = attrgetter(attribute)(import_module(module))
    return found


def stored_formats() -> tuple[Format, ...]:
    """Those that checkpoints may hold beside floats and blocks of GGUF files."""
    return tuple(format_of(row.name) for row in FORMATS.values() if row.is_stored and row.name not in GGUF_BLOCKS)


def weight_formats(quantization: str = NO_FORMAT, exact: str = "plain", activations: str = INT8) -> WeightFormats:
    """The formats of a value of --quantization, "auto" being "none"; `exact`: of floats, by what makes products the same in any
    batch. Codes are kept where that is nothing special."""
    is_plain = quantization in (NO_FORMAT, AUTO) or (quantization == CODES and exact != "plain")
    return WeightFormats(format_of(exact if is_plain else quantization), format_of(exact), activations)


def only_dtype(quantization: str) -> str:
    """The only dtype that models with this value of --quantization compute in, "" for any."""
    return "" if quantization in (NO_FORMAT, AUTO) else FORMATS[quantization].dtype


def is_served(quantization: str, device_type: str) -> bool:
    """Whether a kind of device serves this value of --quantization."""
    return quantization in (NO_FORMAT, AUTO) or device_type in FORMATS[quantization].devices
