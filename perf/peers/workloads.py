"""The workloads: the rows, their prompts and the conversion of seconds to figures. Pure: a seed determines the prompts.

A job is the input of one `generate` call. No prompt repeats within a run, so the prefix cache never hits except in the row that
measures it. Prompts are random token ids, so all engines do the same work regardless of their tokenizers.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import msgspec

CONCURRENCY = 32
FIRST_TOKEN = 256  # below lie special tokens


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """Prompts of token ids and how many tokens to answer to each."""

    prompts: list[list[int]]
    lengths: list[int]

    @property
    def output_tokens(self) -> int:
        return sum(self.lengths)


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One line of the table. `jobs(rng, vocab_size, scale)` are one repeat; `figure(jobs, seconds)` its result."""

    name: str
    unit: str
    words: str
    larger_is_better: bool = True
    jobs: Callable[[random.Random, int, float], list[Job]] | None = None
    figure: Callable[[Sequence[Job], Sequence[float]], float] | None = None


def tokens(rng: random.Random, vocab_size: int, length: float) -> list[int]:
    """Return `length` random ids, at least one."""
    return [rng.randrange(FIRST_TOKEN, vocab_size) for _ in range(max(1, round(length)))]


def answer_length(length: float) -> int:
    return max(2, round(length))


def decode_jobs(rng: random.Random, vocab_size: int, scale: float) -> list[Job]:
    """64 tokens with an answer of 128, and 64 others with an answer of 1: the difference is decoding alone."""
    return [
        Job(prompts=[tokens(rng, vocab_size, 64 * scale)], lengths=[length])
        for length in (answer_length(128 * scale), 1)
    ]


def decode_figure(jobs: Sequence[Job], seconds: Sequence[float]) -> float:
    return (jobs[0].output_tokens - jobs[1].output_tokens) / max(seconds[0] - seconds[1], 1e-9)


def prefill_jobs(rng: random.Random, vocab_size: int, scale: float) -> list[Job]:
    """A prompt of 1,024 tokens; the answer is its first token."""
    return [Job(prompts=[tokens(rng, vocab_size, 1024 * scale)], lengths=[1])]


def long_jobs(rng: random.Random, vocab_size: int, scale: float) -> list[Job]:
    """A prompt of 6,000 tokens; the answer is its first token."""
    return [Job(prompts=[tokens(rng, vocab_size, 6000 * scale)], lengths=[1])]


def prefill_figure(jobs: Sequence[Job], seconds: Sequence[float]) -> float:
    return len(jobs[0].prompts[0]) / seconds[0]


def concurrent_jobs(rng: random.Random, vocab_size: int, scale: float) -> list[Job]:
    """32 requests at once: prompts of 64 to 256 tokens, answers of 64 to 128."""
    prompts = [tokens(rng, vocab_size, rng.uniform(64, 256) * scale) for _ in range(CONCURRENCY)]
    return [Job(prompts=prompts, lengths=[answer_length(rng.uniform(64, 128) * scale) for _ in range(CONCURRENCY)])]


def shared_jobs(rng: random.Random, vocab_size: int, scale: float) -> list[Job]:
    """32 requests at once that begin with the same 512 tokens, 32 of their own behind them; answers of 32."""
    shared = tokens(rng, vocab_size, 512 * scale)
    prompts = [shared + tokens(rng, vocab_size, 32 * scale) for _ in range(CONCURRENCY)]
    return [Job(prompts=prompts, lengths=[answer_length(32 * scale)] * CONCURRENCY)]


def output_rate(jobs: Sequence[Job], seconds: Sequence[float]) -> float:
    return jobs[0].output_tokens / seconds[0]


ROWS = {
    row.name: row
    for row in (
        Row(name="decode", unit="tokens/s", words="decode, 1 request", jobs=decode_jobs, figure=decode_figure),
        Row(name="prefill", unit="tokens/s", words="prefill, 1,024 tokens", jobs=prefill_jobs, figure=prefill_figure),
        Row(name="long", unit="tokens/s", words="prefill, 6,000 tokens", jobs=long_jobs, figure=prefill_figure),
        Row(name="concurrent", unit="tokens/s", words="32 requests", jobs=concurrent_jobs, figure=output_rate),
        Row(name="shared", unit="tokens/s", words="32 requests, shared prefix", jobs=shared_jobs, figure=output_rate),
        Row(name="start", unit="s", words="start to first token", larger_is_better=False),
        Row(name="memory", unit="MB", words="peak memory", larger_is_better=False),
    )
}


def row_jobs(row: Row, vocab_size: int, scale: float, *place: object) -> list[Job]:
    """The jobs of one repeat; `place` (seed, round, repeat) names it, and is the same for all engines."""
    return row.jobs(random.Random(f"{row.name} {place}"), vocab_size, scale)


def warm_up_job(job: Job) -> Job:
    """The same shapes with the shortest answers."""
    return Job(prompts=job.prompts, lengths=[min(length, 2) for length in job.lengths])


def first_job(vocab_size: int, *place: object) -> Job:
    """The first request after a start: 8 tokens, answered with one."""
    return Job(prompts=[tokens(random.Random(f"first {place}"), vocab_size, 8)], lengths=[1])
