"""Operations for training: each computes what another table's does, bit for bit, and has torch's derivative.

Owns the plain forms that are derived. Forward, the kernels of `base` compute, in their own order, so a trainer's numbers are the
engine's. Backward, autograd derives a plain form of the same function in float32; its bits are torch's. Knows no models.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch.nn import functional

from vnext.kernels.calls import GATELESS, AttentionCall, BiasedExperts, RotaryWrite, Router, parts_of
from vnext.kernels.products import marks_of, shares_of
from vnext.kernels.references import XIELU_BETA, XIELU_EPS, silu_limited, swiglu_clamped, turn
from vnext.kernels.table import Operations

GATES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": functional.silu, "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
}  # fmt: skip
LIMITED = {"swiglu_clamped": swiglu_clamped, "silu_limited": silu_limited}
ALONE: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "gelu_tanh": GATES["gelu_tanh"], "gelu": functional.gelu, "relu2": lambda x: functional.relu(x).square(),
}  # fmt: skip


class TrainedWeight(NamedTuple):
    """A weight [..., out, in] that autograd follows, and what `base` packed of its numbers."""

    weight: torch.Tensor
    packed: Any

    @property
    def shape(self) -> torch.Size:
        return self.weight.shape

    @property
    def dtype(self) -> torch.dtype:
        return self.weight.dtype


class Exact(torch.autograd.Function):
    """`kernel(*tensors)` with the derivative of `plain(*tensors)`, which is computed again in the backward pass."""

    @staticmethod
    def forward(context: Any, kernel: Callable[..., Any], plain: Callable[..., Any], *tensors: torch.Tensor) -> Any:
        context.plain = plain
        context.save_for_backward(*tensors)
        return kernel(*tensors)

    @staticmethod
    def backward(context: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        with torch.enable_grad():
            inputs = [tensor.detach().requires_grad_(tensor.is_floating_point()) for tensor in context.saved_tensors]
            found = context.plain(*inputs)
            found = found if isinstance(found, tuple) else (found,)
            return None, None, *torch.autograd.grad(found, inputs, grads, allow_unused=True)


exact: Callable[..., torch.Tensor] = Exact.apply
"""One tensor, or, of a kernel that gives two, two."""


def trainable(base: Operations, lengths: Sequence[int]) -> Operations:
    """The operations of `base` for steps of whole sequences of these lengths, one behind the other, each from its first token on.

    Weights are TrainedWeight or tensors that autograd follows. LoRA and quantised weights are not derived.
    """
    return _Trainable(base, lengths).operations()


class _Trainable:
    """`trainable`, with what `rotary_kv_write` leaves for the attention behind it. Mutable."""

    def __init__(self, base: Operations, lengths: Sequence[int]) -> None:
        self._base, self._lengths = base, tuple(lengths)
        self._turned: tuple[torch.Tensor, RotaryWrite] | None = None

    def operations(self) -> Operations:
        own = ("linear", "gated_linear", "logits", "embedding_rows", "route", "experts", "rotary_kv_write", "paged_attention")
        rows = ("rms_norm", "add_rms_norm", "layer_norm", "activate", "gate_by", "soft_cap")
        derived = {name: getattr(self, name) for name in own} | {name: self._row(name) for name in rows}
        return self._base._replace(**derived)

    def _row(self, name: str) -> Callable[..., Any]:
        """An operation that takes tensors, then numbers."""
        kernel, plain = getattr(self._base, name), globals()[name]

        def derived(*given: Any) -> Any:
            first, *others = [each for each in given if isinstance(each, torch.Tensor)]
            numbers = given[1 + len(others) :]
            kept = first.clone()  # a kernel, or a model, may write the result over it
            return exact(lambda own, *more: kernel(own.clone(), *more, *numbers), lambda *own: plain(*own, *numbers), kept, *others)

        return derived

    def linear(self, x: torch.Tensor, weight: TrainedWeight, bias: torch.Tensor | None) -> torch.Tensor:
        biases = () if bias is None else (bias,)
        return exact(lambda x, _, *own: self._base.linear(x, weight.packed, *(own or (None,))), linear, x, weight.weight, *biases)

    def gated_linear(self, x: torch.Tensor, weight: TrainedWeight, bias: torch.Tensor | None, activation: str) -> torch.Tensor:
        def kernel(x: torch.Tensor, _: torch.Tensor, *own: torch.Tensor) -> torch.Tensor:
            return self._base.gated_linear(x, weight.packed, *(own or (None,)), activation)

        biases = () if bias is None else (bias,)
        return exact(kernel, lambda *given: gated(linear(*given), activation), x, weight.weight, *biases)

    def logits(self, hidden: torch.Tensor, weight: TrainedWeight) -> torch.Tensor:
        return exact(lambda x, _: self._base.logits(x, weight.packed), lambda x, w: x.float() @ w.float().T, hidden, weight.weight)

    def embedding_rows(self, table: Any, ids: torch.Tensor, first: int) -> torch.Tensor:
        weight, held = table if isinstance(table, TrainedWeight) else (table, table.detach())
        kernel = self._base.embedding_rows
        return exact(lambda _: kernel(held, ids, first), lambda own: functional.embedding(ids - first, own), weight)

    def route(
        self, scores: torch.Tensor, router: Router, bias: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        _, ids = self._base.route(scores.detach(), router, bias)

        def plain(scores: torch.Tensor) -> torch.Tensor:
            return shares_of(marks_of(scores, router), ids, router)

        return exact(lambda own: self._base.route(own, router, bias)[0], plain, scores), ids

    def experts(
        self, x: torch.Tensor, shares: torch.Tensor, ids: torch.Tensor, gate_up: TrainedWeight, down: TrainedWeight, activation: str
    ) -> torch.Tensor:
        (first, first_biases), (second, second_biases) = parts_of(gate_up), parts_of(down)

        def kernel(x: torch.Tensor, shares: torch.Tensor, *_: torch.Tensor) -> torch.Tensor:
            both = [
                BiasedExperts(weight.packed, tuple(bias.detach() for bias in biases)) if biases else weight.packed
                for weight, biases in ((first, first_biases), (second, second_biases))
            ]
            return self._base.experts(x, shares, ids, *both, activation)

        def plain(
            x: torch.Tensor, shares: torch.Tensor, wide: torch.Tensor, narrow: torch.Tensor, *biases: torch.Tensor
        ) -> torch.Tensor:
            total, count = torch.zeros_like(x, dtype=torch.float32), len(first_biases)
            for expert in ids.unique().tolist():
                tokens, places = (ids == expert).nonzero(as_tuple=True)
                own = biases[expert :: count or 1] if biases else (None, None)
                found = linear(gated(linear(x[tokens], wide[expert], own[0]), activation), narrow[expert], own[1])
                total = total.index_add(0, tokens, found.float() * shares[tokens, places, None])
            return total.to(x.dtype)

        return exact(kernel, plain, x, shares, first.weight, second.weight, *first_biases, *second_biases)

    def rotary_kv_write(self, qkv: torch.Tensor, write: RotaryWrite) -> torch.Tensor:
        """Writes the cache; the query is derived with the attention that reads it."""
        held = RotaryWrite._make(each.detach() if isinstance(each, torch.Tensor) else each for each in write)
        self._turned = qkv, write
        return self._base.rotary_kv_write(qkv.detach().clone(), held)

    def paged_attention(self, query: torch.Tensor, call: AttentionCall) -> torch.Tensor:
        assert self._turned is not None
        qkv, write = self._turned
        norms = [norm for norm in (write.q_norm, write.k_norm) if norm is not None]
        sinks = [] if call.sinks is None else [call.sinks]

        def plain(qkv: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
            rows = zip(*(each.split(self._lengths) for each in turned(qkv, weights[: len(norms)], write, query.shape[2])))
            given = call._replace(sinks=weights[-1] if sinks else None)
            return torch.cat([attended(own, keys, values, given) for own, keys, values in rows]).to(qkv.dtype)

        return exact(lambda *_: self._base.paged_attention(query, call), plain, qkv, *norms, *sinks)


# ---- plain forms, in float32 inside ------------------------------------------------------------------------------


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    product = x.float() @ weight.float().T
    return (product if bias is None else product + bias.float()).to(x.dtype)


def gated(wide: torch.Tensor, activation: str) -> torch.Tensor:
    if activation in LIMITED:
        return LIMITED[activation](wide)
    if activation in GATELESS:
        return activate(wide, None, None, activation)
    gate, up = wide.float().chunk(2, -1)
    return (GATES[activation](gate) * up).to(wide.dtype)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return functional.rms_norm(x.float(), x.shape[-1:], weight.float(), eps).to(x.dtype)


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    total = x + residual
    return rms_norm(total, weight, eps), total


def layer_norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float) -> torch.Tensor:
    return functional.layer_norm(x.float(), x.shape[-1:], weight.float(), bias.float(), eps).to(x.dtype)


def activate(x: torch.Tensor, above: torch.Tensor | None, below: torch.Tensor | None, activation: str) -> torch.Tensor:
    if activation == "gated_gelu":
        widened, gate = x.chunk(2, dim=1)
        return (functional.gelu(widened.float()) * gate.float()).to(x.dtype)
    if above is not None and below is not None:
        above, below = functional.softplus(above), functional.softplus(below)
        wide = x.float()
        curved = (wide.clamp(max=XIELU_EPS).expm1() - wide) * (below + XIELU_BETA)
        return (curved.where(wide <= 0, wide.square() * above) + wide * XIELU_BETA).to(x.dtype)
    return ALONE[activation](x.float()).to(x.dtype)


def gate_by(x: torch.Tensor, gates: torch.Tensor) -> torch.Tensor:
    return (x.float() * gates.float().sigmoid()).to(x.dtype)


def soft_cap(x: torch.Tensor, cap: float) -> torch.Tensor:
    return cap * (x / cap).tanh()


def turned(
    qkv: torch.Tensor, norms: Sequence[torch.Tensor], write: RotaryWrite, head_dim: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Queries, keys and values [T, heads, D] of qkv, as references.rotary_kv_write makes them with these norms."""
    cosine, sine, kv_heads = write.cosine, write.sine, write.key_cache.shape[1]
    heads = qkv.shape[1] // head_dim - 2 * kv_heads
    query, key, value = qkv.view(len(qkv), -1, head_dim).split((heads, kv_heads, kv_heads), 1)
    if norms:
        query, key = (rms_norm(each, norm, write.eps) for each, norm in zip((query, key), norms, strict=True))
    if cosine is not None and sine is not None:
        query, key = (turn(each, cosine.unsqueeze(1), sine.unsqueeze(1)) for each in (query, key))
    return query, key, value


def attended(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, call: AttentionCall) -> torch.Tensor:
    """Causal attention of one sequence, float32 [T, heads, D], with what the call says beside caches."""
    group, places = query.shape[1] // key.shape[1], torch.arange(len(query))
    key, value = (each.float().repeat_interleave(group, 1) for each in (key, value))
    scores = torch.einsum("qhd,khd->hqk", query.float(), key) * call.scale
    scores = soft_cap(scores, call.softcap) if call.softcap else scores
    behind = places[:, None] - places
    seen = (behind >= 0) & (behind < (call.window or len(query)))
    scores = scores.masked_fill(~seen, float("-inf"))
    if call.sinks is not None:
        scores = torch.cat((scores, call.sinks[:, None, None].expand(-1, len(query), 1)), 2)
    weights = scores.softmax(-1)[:, :, : len(query)]
    return torch.einsum("hqk,khd->qhd", weights, value)
