"""What operations with many arguments are given: a value each, with the names and the order that all implementations share.

Knows no device and no dtype; contracts.py says what the fields must be.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, NamedTuple

if TYPE_CHECKING:
    import numpy as np
    import torch


class Router(NamedTuple):
    """How `route` chooses `per_token` of E experts by scores [T, E].

    A token's marks are the softmax of its scores, or the sigmoid of each. The largest marks are chosen; a bias, where there is one,
    is added for the choice alone. With `groups`, which are equal runs of experts, only those of the `kept_groups` best count, by
    the sum of a group's `group_best` largest. An expert's share is its mark; the shares sum to one if `normalise`; `scale`
    multiplies them. The mixer (SparseMixer, arXiv 2409.12136) takes the largest score of those left, again and again; its share is
    that of the softmax over those left that are at most `margin` below it, as a part of the larger of its and their own size.
    """

    per_token: int
    normalise: bool
    marks: Literal["softmax", "sigmoid", "mixer"] = "softmax"
    scale: float = 1.0
    groups: int = 1
    kept_groups: int = 1
    group_best: int = 2
    margin: float = 0.0


GATELESS = ("relu2",)
"""Activations of experts that have no gate: what is packed as theirs has `up` alone, [E, I, H]."""


class BiasedExperts(NamedTuple):
    """What `pack_experts` gave of weights [E, out, in], and a bias [out] of each expert of the model, whose first one with a weight
    here is number `first`."""

    weights: Any
    biases: tuple[torch.Tensor, ...]
    first: int = 0

    @property
    def shape(self) -> tuple[int, ...]:
        found: tuple[int, ...] = tuple(self.weights.shape)
        return found

    @property
    def dtype(self) -> torch.dtype:
        found: torch.dtype = self.weights.dtype
        return found


def parts_of(experts: Any) -> tuple[Any, tuple[torch.Tensor, ...]]:
    """Experts' weights, and their biases, () for none."""
    return (experts.weights, experts.biases) if isinstance(experts, BiasedExperts) else (experts, ())


class StateRows(NamedTuple):
    """R rows of a step and the pages of pools that hold their states: row r has the tokens starts[r] .. starts[r + 1] and goes on
    from page pages[r], or from zeros where fresh[r], and leaves its state there. starts int32 [R + 1], pages int32 [R], no two
    alike among rows with tokens, fresh bool [R]. The state behind token t is left in page trail[t], too, unless that is -1; trail
    int32 [T], None for no token."""

    starts: torch.Tensor
    pages: torch.Tensor
    fresh: torch.Tensor
    trail: torch.Tensor | None = None


WIDTHS = range(2, 9)
"""Inputs that a short convolution sees."""


class ConvolutionCall(NamedTuple):
    """What short_convolution does with x [T, C], or, `gated`, with [T, 3 * C]: gates before, gates behind, inputs.

    weight [C, W]: of each channel's last W inputs, the newest last; bias [C] or None. pool [page_count, W - 1, C] of x's dtype
    holds the last inputs, the oldest first. `activation`: "silu" or "".
    """

    weight: torch.Tensor
    bias: torch.Tensor | None
    pool: torch.Tensor
    rows: StateRows
    activation: str = ""
    gated: bool = False


class RecurrenceCall(NamedTuple):
    """What recur does with x [T, 2 * key_heads * K + H * V]: H value heads keep a state K x V each, in pool, float32 [P, H, K, V].

    A token's state is its decay times the last one, plus key times change, and what it gives is the state's product with its query.
    decay = exp(-exp(decay_logs) * time) with time = softplus(steps + step_bias), or 1 without steps; decay_logs, step_bias float32
    [H]; steps [T, H]. With strengths [T, H], x has queries, keys and values, the first two are brought to length 1, queries also
    divided by the root of K, and the change is sigmoid(strength) times what the value differs from what the decayed state has for
    the key (gated delta rule, arXiv 2412.06464). Without, x has values, keys and queries, and the change is time times the value
    (Mamba-2, arXiv 2405.21060). What a token gives is normed over V by norm float32 [V], then skips float32 [H] times its value is
    added, then it is multiplied by silu or sigmoid, as `gate` says, of gates [T, H * V]; each of the three may be None.

    A delta may decay key by key, with steps [T, H * K] and step_bias [H * K] (Kimi Delta Attention, arXiv 2510.26692). The other
    rule may decay number by number, with steps [T, H * V], step_bias and skips [H * V] and decay_logs [H, K, V] (Mamba, arXiv
    2312.00752), or by no step at all (lightning attention, arXiv 2501.08313). With a `bound` below 0, decay is exp(bound *
    sigmoid(exp(decay_logs) * (steps + step_bias))). `strength_scale` multiplies the sigmoid of strengths. `by_head`: x has query,
    key and value of each head side by side. `activates`: silu is taken of x.
    """

    steps: torch.Tensor | None
    strengths: torch.Tensor | None
    gates: torch.Tensor | None
    decay_logs: torch.Tensor
    step_bias: torch.Tensor | None
    norm: torch.Tensor | None
    skips: torch.Tensor | None
    eps: float
    key_heads: int
    pool: torch.Tensor
    rows: StateRows
    gate: Literal["silu", "sigmoid"] = "silu"
    by_head: bool = False
    activates: bool = False
    bound: float = 0.0
    strength_scale: float = 1.0


class RotaryWrite(NamedTuple):
    """What rotary_kv_write does with queries, keys and values [T, heads, D].

    q_norm, k_norm [D]: weights of an rms_norm over each head (None: none). cosine, sine float32 [T, R / 2]: the first R channels of
    each head turn (None: none). Caches [page_count, kv_heads, block_size, D]; slots int64 [T], each block * block_size + offset.
    """

    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    eps: float
    cosine: torch.Tensor | None
    sine: torch.Tensor | None
    key_cache: torch.Tensor
    value_cache: torch.Tensor
    slots: torch.Tensor
    key_scale: float = 1.0
    value_scale: float = 1.0


class AttentionStep(NamedTuple):
    """What attention_metadata is given: R rows, whose queries are query_starts[r]:query_starts[r + 1] and end their contexts.

    query_starts [R + 1] and context_lengths [R] are host arrays, so nothing waits for the device; block_table int32 [R, W] is on
    it, and what it holds beyond a row's context is never looked at. Rows without queries are idle. `windows`: those of the model's
    layers, in tokens; 0 stands for the whole context. `shared_blocks`: with how many common blocks all rows begin; a form may read
    them once for all of them.
    """

    query_starts: np.ndarray
    context_lengths: np.ndarray
    block_table: torch.Tensor
    block_size: int
    kv_head_count: int
    windows: tuple[int, ...] = (0,)
    shared_blocks: int = 0


class Selection(NamedTuple):
    """Which keys queries see in paged_attention: the `count` of their context with the highest scores, or all of a shorter one.

    query [T, H, I], weights float32 [T, H]; cache [page_count, 1, block_size, I] of the query's dtype has an index key where the
    cache has a key. A key's score is the sum over heads of weight times what the product of query and index key has above 0.
    `found` is empty, or holds what was chosen by a call before, of another layer.
    """

    query: torch.Tensor
    weights: torch.Tensor
    cache: torch.Tensor
    count: int  # type: ignore[assignment]  # hides tuple.count
    found: list[torch.Tensor]


class AttentionCall(NamedTuple):
    """What queries see in paged_attention. Caches as in RotaryWrite; `metadata` is what attention_metadata made for them.

    `scale` multiplies scores. A query sees the last `window` tokens, itself included (0: all). With a softcap c above 0 a score s
    becomes c * tanh(s / c) (Gemma 2, arXiv 2408.00118). Caches of float8_e4m3fn hold keys and values divided by the scales.
    sinks float32 [heads]: a score a head that takes its part of the softmax and has no value (gpt-oss, arXiv 2508.10925); None for
    none. `selection`: which keys a query sees, None for all; there is then no window.
    """

    key_cache: torch.Tensor
    value_cache: torch.Tensor
    metadata: Any
    scale: float
    window: int = 0
    softcap: float = 0.0
    key_scale: float = 1.0
    value_scale: float = 1.0
    sinks: torch.Tensor | None = None
    selection: Selection | None = None
