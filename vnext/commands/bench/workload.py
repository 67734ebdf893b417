"""Workloads: prompts of exact lengths, the same for the same seed on every machine with the same Python.

Owns how prompts are made: from running text (the docstrings of Python's builtins) or from random token ids. Prompts are
token ids, so that their lengths are exact.
"""

from __future__ import annotations

import builtins
import random

import msgspec

from vnext.runtime.protocol.sampling_params import SamplingParams
from vnext.runtime.protocol.settings import SettingsError
from vnext.text.tokenizer import Tokenizer


class Workload(msgspec.Struct, frozen=True, kw_only=True):
    """Lengths are in tokens; the first `shared_length` of `input_length` are the same in every prompt."""

    prompt_count: int
    input_length: int
    output_length: int
    shared_length: int = 0
    random: bool = False
    seed: int = 0


def numbers_of(text: str, flag: str, low: int, high: int) -> list[int]:
    """The numbers of an option. Raises SettingsError for one outside of these bounds."""
    try:
        found = [int(word) for word in text.split(",")]
    except ValueError:
        found = [low - 1]
    if any(not low <= each <= high for each in found):
        raise SettingsError(f"{flag} is {text!r}: write numbers from {low} to {high} with commas between them.")
    return found


def prompts(workload: Workload, tokenizer: Tokenizer) -> list[list[int]]:
    """`prompt_count` prompts of token ids."""
    rng = random.Random(workload.seed)
    pool = plain_ids(tokenizer) if workload.random else running_text(tokenizer)
    shared = cut(rng, pool, workload.shared_length, workload.random)
    own_length = workload.input_length - workload.shared_length
    return [shared + cut(rng, pool, own_length, workload.random) for _ in range(workload.prompt_count)]


def params(workload: Workload) -> SamplingParams:
    """Greedy sampling, always to the full length."""
    return SamplingParams(temperature=0.0, max_tokens=workload.output_length, ignore_eos=True)


def cut(rng: random.Random, pool: list[int], length: int, at_random: bool) -> list[int]:
    """`length` ids: drawn one by one, or a piece of text that begins anywhere and starts over at the end."""
    if at_random:
        return rng.choices(pool, k=length)
    start = rng.randrange(len(pool))
    return [pool[(start + place) % len(pool)] for place in range(length)]


def plain_ids(tokenizer: Tokenizer) -> list[int]:
    """Ids of tokens with some text, without special tokens."""
    return [token for token in range(tokenizer.vocab_size) if tokenizer.decode([token])]


def running_text(tokenizer: Tokenizer) -> list[int]:
    """Some ten thousand tokens of English about Python."""
    texts = (getattr(builtins, name).__doc__ or "" for name in sorted(dir(builtins)))
    return tokenizer.encode("\n\n".join(texts), add_special_tokens=False)
