"""Configuration that decisions depend on: frozen, recorded in the first event of every log.

Owns the bounds of the scheduler, the cache and the pipeline. Host, port, paths and devices are not here: no decision
may depend on them.
"""

from __future__ import annotations

import msgspec


class SchedulerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Bounds of one engine. Counts are in tokens unless the name says otherwise.

    `block_size` tokens a block, `block_count` blocks in the cache, `batch_tokens_max` tokens a step,
    `running_max` requests in the batch, `model_len_max` tokens a request, `prefill_threshold` tokens a request may
    take in one step (0: no such bound), `pipeline_depth` steps planned and not yet committed (1 is synchronous),
    `policy` the name of who is served first (vnext/sched/policies.py; the state does not know what it means),
    `digest_interval` steps between two digests that every rank reports, `windows` for each group of layers the tokens
    that its attention sees, 0 for all: a block is one page of the cache in each group (windows.py). () is one group that
    sees all. `block_count` counts pages.
    """

    block_size: int
    block_count: int
    batch_tokens_max: int
    running_max: int
    model_len_max: int
    prefill_threshold: int = 0
    prefix_caching: bool = True
    chunked_prefill: bool = True
    pipeline_depth: int = 2
    policy: str = "fcfs"
    eos_token_ids: tuple[int, ...] = ()
    vocab_size: int = 0
    digest_interval: int = 64
    windows: tuple[int, ...] = ()

    @property
    def group_count(self) -> int:
        return len(self.windows) or 1


def request_length_max(config: SchedulerConfig) -> int:
    """Tokens that prompt and answer may have together; the answer's last one is never written into the cache."""
    length = min(config.model_len_max, config.block_size * config.block_count + 1)
    return length if config.chunked_prefill else min(length, config.batch_tokens_max + 1)
