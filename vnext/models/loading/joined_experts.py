"""Experts that files hold in one tensor a layer, as tensors of one expert each, under the usual names. Those of gpt-oss:

    gate_up_proj [E, in, 2 * I], down_proj [E, I, out]                          floats
    gate_up_proj_blocks [E, 2 * I, groups, 16], gate_up_proj_scales             MXFP4: two numbers in a byte, E8M0
    gate_up_proj_bias [E, 2 * I], down_proj_bias [E, out]
Outputs of gate and up take turns. Without biases (Mistral 4) gate_up_proj is [E, 2 * I, in], gate above up, down_proj [E, out, I];
Granite calls the two input_linear and output_linear. Llama 4 and Qwen3-VL have gate_up_proj [E, in, 2 * I], gate before up, and
down_proj [E, I, out].
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from vnext.models.loading.sources.safetensors import Stored

UP, DOWN, EXPERTS = "gate_up_proj", "down_proj", ".experts."
BIAS = UP + "_bias"
GRANITE = ".block_sparse_moe."
GRANITE_NAMES = {f"{GRANITE}input_linear.weight": UP, f"{GRANITE}output_linear.weight": DOWN}
ENDINGS = {"": "weight", "_blocks": "weight_packed", "_scales": "weight_scale", "_bias": "bias"}
TURNED, IN_BYTES = "", "_blocks"


class OneExpert(NamedTuple):
    """Outputs `outputs` of expert `expert` in a tensor of all experts, as [out, in] or [out]; the file's are `turned`, or of more
    axes."""

    whole: Stored
    expert: int
    outputs: slice
    turned: bool

    @property
    def file(self) -> Path:
        return self.whole.file

    @property
    def dtype(self) -> str:
        return self.whole.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        _, *sizes = self.whole.shape
        if self.turned:
            sizes = sizes[::-1]
        count = len(range(sizes[0])[self.outputs])
        return (count, *([int(np.prod(sizes[1:]))] if len(sizes) > 1 else []))

    @property
    def start(self) -> int:
        return self.whole.start + self.expert * self._size_bytes

    @property
    def stop(self) -> int:
        """As if outputs that take turns lay one behind the other: what it takes is right."""
        outputs = self.whole.shape[-1 if self.turned else 1]
        return self.start + self._size_bytes * self.shape[0] // outputs

    def part(self, ranges: tuple[slice, ...]) -> np.ndarray:
        """A part of the tensor, copied where it is not dense."""
        found = self.whole.part(())[self.expert]
        found = (found.T if self.turned else found)[self.outputs]
        return np.ascontiguousarray(found.reshape(self.shape)[ranges])

    def release(self) -> None:
        """Release the memory of the tensor's pages, which hold the other experts too."""
        self.whole.release()

    @property
    def _size_bytes(self) -> int:
        return (self.whole.stop - self.whole.start) // self.whole.shape[0]


def by_expert(tensors: dict[str, Stored]) -> dict[str, Stored | OneExpert]:
    """The tensors of a file or more, those of all experts cut into those of each."""
    for ending, name in GRANITE_NAMES.items():
        tensors = {each.replace(ending, f"{GRANITE[:-1]}{EXPERTS}{name}"): stored for each, stored in tensors.items()}
    take_turns = any(name.endswith(EXPERTS + BIAS) for name in tensors)
    if not take_turns and not any(name.endswith(EXPERTS + UP) for name in tensors):
        return dict(tensors)
    found: dict[str, Stored | OneExpert] = {}
    for name, stored in tensors.items():
        here = name.partition(EXPERTS)[0] + EXPERTS
        found.update(_parts(name, stored, take_turns, _are_turned(tensors.get(here + UP), tensors.get(here + DOWN))))
    return found


def _are_turned(up: Stored | None, down: Stored | None) -> bool:
    """Whether floats are [E, in, out]: up then has twice the outputs that down has inputs, as its last size."""
    if up is None or down is None or len(up.shape) != 3 or len(down.shape) != 3:
        return False
    return up.shape[2] == 2 * down.shape[1] and up.shape[1] == down.shape[2]


def _parts(name: str, stored: Stored, take_turns: bool, are_turned: bool) -> Iterator[tuple[str, Stored | OneExpert]]:
    here, dot, own = name.partition(EXPERTS)
    for module, parts in ((UP, ("gate_proj", "up_proj")), (DOWN, (DOWN,))):
        ending = ENDINGS.get(own.removeprefix(module)) if own.startswith(module) else None
        if ending is None or len(stored.shape) < 2:
            continue
        turned = own == module and are_turned
        size = stored.shape[2 if turned else 1] // len(parts)
        for expert in range(stored.shape[0]):
            for place, part in enumerate(parts):
                outputs = slice(place, None, len(parts)) if take_turns else slice(place * size, (place + 1) * size)
                yield f"{here}{dot}{expert}.{part}.{ending}", OneExpert(stored, expert, outputs, turned)
        return
    yield name, stored
