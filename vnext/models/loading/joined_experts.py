"""Experts that files hold in one tensor a layer, as tensors of one expert each, under the usual names. Those of gpt-oss:

    gate_up_proj [E, in, 2 * I], down_proj [E, I, out]                          floats
    gate_up_proj_blocks [E, 2 * I, groups, 16], gate_up_proj_scales             MXFP4: two numbers in a byte, E8M0
    gate_up_proj_bias [E, 2 * I], down_proj_bias [E, out]
Outputs of gate and up take turns. Without biases (Mistral 4) gate_up_proj is [E, 2 * I, in], gate above up, down_proj [E, out, I];
Granite and JetMoe call the two input_linear and output_linear. Llama 4, Qwen3-VL and Aria (fc1, fc2) have gate_up_proj
[E, in, 2 * I], gate before up, and down_proj [E, I, out]. DBRX has w1 (gate), v1 (up) and w2 (down), each [E * I, hidden]. JetMoe's
heads have experts too: input_linear [E, out, in] makes queries, output_linear is behind them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from vnext.models.loading.sources.safetensors import Stored

UP, DOWN, EXPERTS = "gate_up_proj", "down_proj", ".experts."
BIAS = UP + "_bias"
IN_A_LAYER = re.compile(r"\.(mlp|block_sparse_moe)\.((input_linear|experts\.fc1)|output_linear|experts\.fc2)\.weight$")
"""Of Granite, JetMoe and Aria."""
DBRX, LAST = ("mlp.w1", "mlp.v1", "mlp.w2"), "mlp.w2"
MODULES = (
    (UP, ("gate_proj", "up_proj")), (DOWN, (DOWN,)), *zip(DBRX, (("gate_proj",), ("up_proj",), (DOWN,))),
    *((f"{name}.weight", (name,)) for name in ("input_linear", "output_linear")),
)  # fmt: skip
"""What holds all experts -> what each one has of it."""
MARKS = tuple(EXPERTS + name for name in (UP, BIAS, LAST))
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
    tensors = {_usual(name, stored): _in_three(name, stored, tensors) for name, stored in tensors.items()}
    if not any(name.endswith(MARKS) for name in tensors):
        return dict(tensors)
    take_turns = any(name.endswith(EXPERTS + BIAS) for name in tensors)
    found: dict[str, Stored | OneExpert] = {}
    for name, stored in tensors.items():
        here = name.partition(EXPERTS)[0] + EXPERTS
        found.update(_parts(name, stored, take_turns, _are_turned(tensors.get(here + UP), tensors.get(here + DOWN))))
    return found


def _usual(name: str, stored: Stored) -> str:
    """The name by which all experts of a layer go here."""
    found = IN_A_LAYER.search(name) if len(stored.shape) == 3 else None
    return f"{name[: found.start()]}.{found[1]}{EXPERTS}{UP if found[3] else DOWN}" if found else name


def _in_three(name: str, stored: Stored, tensors: dict[str, Stored]) -> Stored:
    """DBRX's [E * I, hidden] as [E, I, hidden]: its router has a row for each expert."""
    here, _, own = name.partition(EXPERTS)
    router = tensors.get(f"{here}.router.layer.weight") if own in DBRX else None
    return stored._replace(shape=(router.shape[0], stored.shape[0] // router.shape[0], stored.shape[1])) if router else stored


def _are_turned(up: Stored | None, down: Stored | None) -> bool:
    """Whether floats are [E, in, out]: up then has twice the outputs that down has inputs, as its last size."""
    if up is None or down is None or len(up.shape) != 3 or len(down.shape) != 3:
        return False
    return up.shape[2] == 2 * down.shape[1] and up.shape[1] == down.shape[2]


def _parts(name: str, stored: Stored, take_turns: bool, are_turned: bool) -> Iterator[tuple[str, Stored | OneExpert]]:
    here, dot, own = name.partition(EXPERTS)
    for module, parts in MODULES:
        ending = ENDINGS.get(own.removeprefix(module)) if own.startswith(module) else None
        if ending is None or len(stored.shape) < (3 if ending == "weight" else 2):
            continue
        turned = own == module and (are_turned or own == LAST)
        size = stored.shape[2 if turned else 1] // len(parts)
        for expert in range(stored.shape[0]):
            for place, part in enumerate(parts):
                outputs = slice(place, None, len(parts)) if take_turns else slice(place * size, (place + 1) * size)
                yield f"{here}{dot}{expert}.{part}.{ending}", OneExpert(stored, expert, outputs, turned)
        return
    yield name, stored
