"""Ways to run an engine that change no answer: settings by name."""

from __future__ import annotations

from typing import Any

WAYS: dict[str, dict[str, Any]] = {
    "ahead": {},
    "in chunks": {"max_num_batched_tokens": 24, "long_prefill_token_threshold": 7},
    "preempted": {"num_blocks_override": 24, "max_num_batched_tokens": 40},
    "in step, uncached": {"async_scheduling": False, "enable_prefix_caching": False},
    "drafts": {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}},
    "two ranks": {"executor": "mp", "tensor_parallel_size": 2, "digest_interval": 1},
}
