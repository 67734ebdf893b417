"""Reference products with weights, in plain torch on any device, and the packing that comes before them.

A weight goes once, at load, through `pack_weight` or `pack_experts` of the implementation that will use it. What comes
back belongs to that implementation; it has the `shape` and `dtype` of the plain weight. The reference packs nothing, but
a format (format.py) may give something that multiplies by itself.
Biases are added apart from the products: a fused addition rounds otherwise for one row than for many. Each row's result
is the same alone and in a batch as far as the product of one matrix is (see determinism at start-up).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch.nn import functional

from vnext.kernels.calls import Router, parts_of
from vnext.kernels.codes import Codes
from vnext.kernels.format import INT8, Format, PlainWeight
from vnext.kernels.formats.coded import CodesWeight
from vnext.kernels.formats.floats import PLAIN
from vnext.kernels.references import gelu_tanh_and_mul, rows, silu_and_mul, silu_limited, swiglu_clamped
from vnext.kernels.shards import joined as joined_sums

Change = Callable[[torch.Tensor], torch.Tensor]
GATES: Mapping[str, Change] = MappingProxyType(
    {
        "silu": silu_and_mul, "gelu_tanh": gelu_tanh_and_mul, "swiglu_clamped": swiglu_clamped, "silu_limited": silu_limited,
        "relu2": lambda x: x.relu().square(),
    }
)  # fmt: skip
"""By activation; of those in GATELESS without gates."""
Parts = torch.Tensor | tuple[torch.Tensor, ...]
"""A weight, or parts of it one below the other, which are copied: they may lie in memory that soon goes."""


class CutWeight(NamedTuple):
    """A weight in shards, [..., out, in / n] each and of one format, whose products are added. An index picks one expert."""

    pieces: tuple[PlainWeight | torch.Tensor, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        *outer, inputs = self.pieces[0].shape
        return (*outer, inputs * self.shards)

    @property
    def dtype(self) -> torch.dtype:
        found: torch.dtype = self.pieces[0].dtype
        return found

    @property
    def shards(self) -> int:
        return len(self.pieces)

    def __getitem__(self, expert: int) -> CutWeight:  # type: ignore[override]
        return CutWeight(tuple(piece[expert] for piece in self.pieces))

    def sums(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, in] times the weight -> float32 [T, out]."""
        found: torch.Tensor = joined_sums([sums(part, piece).float() for part, piece in zip(x.chunk(self.shards, 1), self.pieces)])
        return found

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        """Rows `ids` int64 [N] of the weight -> [N, in]."""
        return torch.cat([rows(piece, ids) for piece in self.pieces], 1)


def formed(weight: torch.Tensor, format: Format, shards: int = 1) -> PlainWeight | torch.Tensor:
    """A weight [..., out, in] in a format, its inputs in so many shards."""
    if shards == 1:
        return format.formed(weight)
    return CutWeight(tuple(format.formed(piece.contiguous()) for piece in weight.chunk(shards, -1)))


def joined(weight: Parts) -> torch.Tensor:
    """The weight in one."""
    return torch.cat(weight) if isinstance(weight, tuple) else weight


def pack_weight(weight: Parts, format: Format = PLAIN, shards: int = 1) -> Any:
    """A weight [out, in] as `linear`, `gated_linear` and `logits` want. A tensor may come back as it is.

    `shards`, which divide the inputs evenly: each is summed alone, and the sums are added as kernels/shards.py does.
    """
    return formed(joined(weight), format, shards)


def pack_gated_weight(weight: Parts, activation: str, format: Format = PLAIN) -> Any:
    """A weight [2 * I, in], gate, then up, as `gated_linear` with this activation wants, without bias."""
    return formed(joined(weight), format)


def pack_experts(weights: torch.Tensor, activation: str, format: Format = PLAIN, shards: int = 1) -> Any:
    """The weights [E, out, in] of E experts as `experts` wants. They may be the same tensor.

    `activation` is that of weights that hold gate and up, "" for others. `shards` as of `pack_weight`.
    """
    return formed(weights, format, shards)


def pack_codes(
    codes: tuple[Codes, ...], dtype: torch.dtype, activation: str, shards: int, activations: str = INT8
) -> CodesWeight | CutWeight:
    """A weight of few bits, in parts one below the other, as products of activations of `dtype` want it. `activation`: of one with
    gate and up, "" for others. `shards` as of `pack_weight`. `activations`: what these become first, INT8 or BF16."""
    weight, width = CodesWeight(codes, dtype, activations), codes[0].codes.shape[1] // shards
    pieces = tuple(weight.shard(slice(first * width, (first + 1) * width)) for first in range(shards))
    return weight if shards == 1 else CutWeight(pieces)  # type: ignore[arg-type]  # no index picks an expert of a matrix


def linear(x: torch.Tensor, weight: Any, bias: torch.Tensor | None) -> torch.Tensor:
    """x [T, in] times weight [out, in], plus bias [out] if any -> [T, out] in x's dtype."""
    return completed(sums(x, weight), x.dtype, bias)


def sums(x: torch.Tensor, weight: Any) -> torch.Tensor:
    """x [T, in] times weight [out, in] -> [T, out], not rounded to x's dtype where the weight's format is summed in float32."""
    found: torch.Tensor = functional.linear(x, weight) if isinstance(weight, torch.Tensor) else weight.sums(x)
    return found


def row_linear(x: torch.Tensor, weight: Any, bias: torch.Tensor | None, join: Change) -> torch.Tensor:
    """`linear` of ranks that have a part of the inputs each: `join` adds their `sums` to the same total on every rank."""
    return completed(join(sums(x, weight)), x.dtype, bias)


def completed(total: torch.Tensor, dtype: torch.dtype, bias: torch.Tensor | None) -> torch.Tensor:
    """A sum, rounded, plus the bias if any. May change its argument."""
    product = total.to(dtype)
    return product if bias is None else product.add_(bias)


def gated_linear(
    x: torch.Tensor, weight: Any, bias: torch.Tensor | None, activation: str, change: Change | None = None
) -> torch.Tensor:
    """activation(gate) * up -> [T, I] in x's dtype, where `linear` gives [T, 2 * I]: gate, then up.

    Activations: those of GATES. `change` gets the product before its activation and returns what is activated.
    """
    wide = linear(x, weight, bias)
    return GATES[activation](wide if change is None else change(wide))


def logits(hidden: torch.Tensor, weight: Any) -> torch.Tensor:
    """hidden [S, in] times weight [vocabulary, in] -> float32 [S, vocabulary]."""
    return sums(hidden, weight).float()


def head_products(x: torch.Tensor, weight: Any) -> torch.Tensor:
    """Each head of x [T, H, in] by its own weight of [H, out, in], as `pack_experts` gives it -> [T, H, out] in x's dtype."""
    return torch.stack([linear(x[:, head], weight[head], None) for head in range(x.shape[1])], 1)


def route(scores: torch.Tensor, router: Router, bias: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """The experts of each token by scores [T, E], as `router` says: (shares float32 [T, per_token], ids int64 [T, per_token]).

    Largest first; of equals the lower id. bias float32 [E] or None.
    """
    if router.marks == "mixer":
        return mixed(scores.float(), router)
    marks = marks_of(scores, router)
    ids = preferred(marks if bias is None else marks + bias, router).sort(dim=-1, descending=True, stable=True)[1]
    ids = ids[:, : router.per_token].contiguous()
    return shares_of(marks, ids, router), ids


def mixed(scores: torch.Tensor, router: Router) -> tuple[torch.Tensor, torch.Tensor]:
    """As `route`, by the mixer, of scores float32 [T, E]."""
    left, found = scores, []
    for _ in range(router.per_token):
        best = left.sort(dim=-1, descending=True, stable=True)[1][:, :1]
        peak = left.gather(1, best)
        is_far = (peak - left) / scores.abs().maximum(peak) > router.margin
        found.append((left.masked_fill(is_far, -torch.inf).softmax(-1).gather(1, best), best))
        left = left.scatter(1, best, -torch.inf)
    shares, ids = (torch.cat(parts, 1) for parts in zip(*found))
    return shares, ids


def marks_of(scores: torch.Tensor, router: Router) -> torch.Tensor:
    """The marks float32 of scores [T, E]. The sigmoid is spelled out for the reason given at `references.silu_and_mul`."""
    if router.marks == "softmax":
        return scores.float().softmax(-1)
    return 1.0 / (scores.float().neg().exp() + 1.0)


def preferred(marks: torch.Tensor, router: Router) -> torch.Tensor:
    """Marks [T, E] with -inf in all groups but the best; of equal groups the first ones."""
    if router.groups == router.kept_groups:
        return marks
    grouped = marks.unflatten(1, (router.groups, -1))
    best = grouped.topk(router.group_best, dim=-1)[0].sum(-1).sort(dim=-1, descending=True, stable=True)[1]
    kept = torch.zeros(grouped.shape[:2], dtype=torch.bool, device=marks.device).scatter_(1, best[:, : router.kept_groups], True)
    found: torch.Tensor = grouped.masked_fill(~kept.unsqueeze(-1), -torch.inf).flatten(1)
    return found


def shares_of(marks: torch.Tensor, ids: torch.Tensor, router: Router) -> torch.Tensor:
    """The shares float32 [T, k] of the experts ids [T, k], which are summed in their order."""
    shares = marks.gather(1, ids)
    if router.normalise:
        total = shares[:, :1].clone()
        for place in range(1, router.per_token):
            total = total + shares[:, place : place + 1]
        shares = shares / total
    return shares * router.scale if router.scale != 1.0 else shares


def experts(
    x: torch.Tensor,
    shares: torch.Tensor,
    ids: torch.Tensor,
    gate_up: Any,
    down: Any,
    activation: str,
    join: Change | None = None,
) -> torch.Tensor:
    """See `experts_by`, with the products of this file."""
    return experts_by(ExpertProducts(linear, sums, gated_linear), x, shares, ids, gate_up, down, activation, join)


class ExpertProducts(NamedTuple):
    """The products that experts make: `gated_linear`, and behind it `linear`, or `sums` where they are a part of a rank's."""

    linear: Callable[[torch.Tensor, Any, torch.Tensor | None], torch.Tensor]
    sums: Callable[[torch.Tensor, Any], torch.Tensor]
    gated_linear: Callable[[torch.Tensor, Any, torch.Tensor | None, str], torch.Tensor]


def experts_by(
    by: ExpertProducts,
    x: torch.Tensor,
    shares: torch.Tensor,
    ids: torch.Tensor,
    gate_up: Any,
    down: Any,
    activation: str,
    join: Change | None = None,
) -> torch.Tensor:
    """The sum over a token's k experts of share * down(activation(gate(x)) * up(x)), for x [T, H] -> [T, H].

    shares float32 and ids int64 [T, k]; gate_up [E, 2 * I, H], or [E, I, H] of up alone for activations in GATELESS, down
    [E, H, I], either with biases. Tokens are sorted by expert, and each expert that has tokens makes one product of them all. A
    token's parts are summed in float32 in the order of its ids, so who else went to its experts changes nothing. `join` adds the
    products [T * k, H] of ranks that have a part of I each, before they are rounded. Ids beyond the E
    experts are those of other ranks: here they give zeros.
    """
    count, chosen = gate_up.shape[0], ids.reshape(-1)
    chosen = chosen.where((chosen >= 0) & (chosen < count), count)
    order = chosen.argsort(stable=True)
    (wide, wide_biases), (narrow, narrow_biases) = parts_of(gate_up), parts_of(down)
    sorted_x = x.index_select(0, torch.div(order, ids.shape[1], rounding_mode="floor"))
    products = torch.zeros(sorted_x.shape, dtype=torch.float32 if join else x.dtype, device=x.device)
    start = 0
    for expert, size in enumerate(torch.bincount(chosen, minlength=count).tolist()[:count]):
        if size:
            here = slice(start, start + size)
            bias = wide_biases[gate_up.first + expert] if wide_biases else None
            inner = by.gated_linear(sorted_x[here], wide[expert], bias, activation)
            products[here] = by.sums(inner, narrow[expert]) if join else by.linear(inner, narrow[expert], None)
            start += size
    if join:  # in the order of tokens, which all ranks have
        products = join(torch.empty_like(products).index_copy_(0, order, products)).to(x.dtype)[order]
    if narrow_biases:
        numbers = ids.reshape(-1)[order] + down.first
        for expert in numbers.unique().tolist():
            products[numbers == expert] += narrow_biases[expert]
    return sum_of_shares(products, order, shares, x.dtype)


def sum_of_shares(products: torch.Tensor, order: torch.Tensor, shares: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Products [T * k, H], of which row n is that of place order[n] of [T, k], times shares float32 [T, k], summed in
    float32 in the order of a token's places -> [T, H]."""
    parts = torch.empty(products.shape, dtype=torch.float32, device=products.device).index_copy_(0, order, products.float())
    parts = parts.view(*shares.shape, products.shape[1]).mul_(shares.unsqueeze(-1))
    total = parts[:, 0].clone()
    for place in range(1, shares.shape[1]):
        total += parts[:, place]
    return total.to(dtype)
