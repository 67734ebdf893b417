"""The configuration that decisions depend on: frozen, and recorded in the first event of every log.

Owns the limits of the scheduler, the cache and the pipeline. Host, port, paths and devices are not here, because no
decision may depend on them.
"""

from __future__ import annotations

import msgspec

STORED_NAMES = {
    "page_count": "block_count",
    "max_num_batched_tokens": "batch_tokens_max",
    "max_num_seqs": "running_max",
    "max_model_len": "model_len_max",
    "long_prefill_token_threshold": "prefill_threshold",
}
"""The names of these fields in logs and JSON answers, unchanged since the first version."""


DRAFTERS = ("ngram", "grammar", "suffix", "draft_model", "eagle3", "mtp")
"""The methods of speculative decoding, by vLLM's names."""


MEASURED = -1
"""The row cost of settings that leave it to a rank to measure; a log has the cost."""


class Speculation(msgspec.Struct, frozen=True, kw_only=True):
    """Speculative decoding: ranks draft tokens of a request from its own tokens, and a step computes them with the next one.

    `method` is the drafter (vnext/sampling/drafters). A step takes at most `num_speculative_tokens` drafts of a request.
    A drafter must find `prompt_lookup_min` tokens; the n-gram drafter looks for `prompt_lookup_max`. `row_cost` is the time that
    one more token adds to a step, `row_cost_many` the time that it adds to a step of more than FEW_ROWS requests (0: as much), and
    `step_cost` the time that a step takes longer for having drafts at all, all in thousandths of the time of a step of one token;
    drafts that cannot pay are left out. The
    suffix drafter looks for `suffix_decoding_max_tree_depth` tokens, keeps `suffix_decoding_max_cached_requests` answers, and
    drafts at most `suffix_decoding_max_spec_factor` times as many tokens as it has found, no draft that is less likely than
    `suffix_decoding_min_token_prob`. `model` is the folder or hub id of the draft model or head, "" for none.
    """

    method: str = "ngram"
    num_speculative_tokens: int = 4
    prompt_lookup_min: int = 2
    prompt_lookup_max: int = 4
    row_cost: int = 0
    suffix_decoding_max_tree_depth: int = 24
    suffix_decoding_max_cached_requests: int = 10_000
    suffix_decoding_max_spec_factor: float = 1.0
    suffix_decoding_min_token_prob: float = 0.1
    model: str = ""
    step_cost: int = 0
    row_cost_many: int = 0


class SchedulerConfig(msgspec.Struct, frozen=True, kw_only=True, rename=STORED_NAMES):
    """The limits of one engine. Counts are in tokens unless the name says otherwise.

    `block_size`: tokens in a block. `page_count`: pages in the cache. `max_num_batched_tokens`: tokens in a step.
    `max_num_seqs`: requests in the batch. `max_model_len`: tokens in a request. `long_prefill_token_threshold`: tokens
    that one request may compute in one step; 0 means no limit. `pipeline_depth`: steps planned and not yet committed; 1
    is synchronous. `policy`: the name of the scheduling policy (vnext/sched/policies.py); the state only counts for `fair` what
    each client had computed, and of one that is alone nothing, unless `counts_alone` says so, as engines once did.
    `digest_interval`: steps between two digests that every rank reports. `windows`: the attention window of each group of layers in
    tokens, 0 for full attention; a block takes one page of the cache in each group (windows.py). ()
    means one group with full attention. `speculation`: None means no drafts. `max_loras`: slots for LoRA adapters; 0 means that
    no request has one. `pinned_kv_fraction`: the share of the pages that pins may hold. `microbatches`: the parts into which
    requests that decode are spread, so that the stages of a pipeline compute at once (expected.py); 1 means that each step takes
    all of them. `state_pages`: pages for the states of recurrent layers (recurrent.py), 0 for a model without; the cache keeps a
    snapshot every `snapshot_interval` tokens, a multiple of the block's, 0 for none. `inputs_a_step`: images' tiles and sounds that
    the prompts of a step may begin (expected.py), 0 for any number. `input_units`: units in which ranks encode UNIT_SPAN tokens of
    one, 0 for whole; `input_tokens`: tokens of inputs in a step beside requests that decode, 0 for any number. `guidance`: requests
    may have some; the second half of `windows` is then that of their other halves, which lose no page. `grids`: inputs are
    images whose tokens lie in rows (store/inputs.py). `guided_hits`: requests with guidance take blocks from the cache up to where
    their halves begin, as once they did not.
    """

    block_size: int
    page_count: int
    max_num_batched_tokens: int
    max_num_seqs: int
    max_model_len: int
    long_prefill_token_threshold: int = 0
    prefix_caching: bool = True
    chunked_prefill: bool = True
    pipeline_depth: int = 2
    policy: str = "fcfs"
    eos_token_ids: tuple[int, ...] = ()
    vocab_size: int = 0
    digest_interval: int = 64
    windows: tuple[int, ...] = ()
    speculation: Speculation | None = None
    max_loras: int = 0
    pinned_kv_fraction: float = 0.0
    microbatches: int = 1
    state_pages: int = 0
    snapshot_interval: int = 1024
    inputs_a_step: int = 0
    input_units: int = 0
    input_tokens: int = 0
    counts_alone: bool = True
    guidance: bool = False
    grids: bool = False
    guided_hits: bool = False

    @property
    def group_count(self) -> int:
        return len(self.windows) or 1

    @property
    def takes_snapshots(self) -> bool:
        """Whether the cache keeps states of recurrent layers."""
        return self.state_pages > 0 and self.prefix_caching and self.snapshot_interval > 0

    @property
    def pinned_pages_max(self) -> int:
        """Pages that pins may hold."""
        return int(self.page_count * self.pinned_kv_fraction) if self.prefix_caching else 0


UNIT_SPAN = 1024


def units_of(config: SchedulerConfig, tokens: int) -> int:
    """The units in which ranks encode an input of so many tokens."""
    return max(-(-tokens * config.input_units // UNIT_SPAN), 1)


def request_length_max(config: SchedulerConfig) -> int:
    """The most tokens that a prompt and its answer may have together. The answer's last token is never written to the cache."""
    length = min(config.max_model_len, config.block_size * config.page_count + 1)
    return length if config.chunked_prefill else min(length, config.max_num_batched_tokens + 1)
