"""`--from-log`: the requests of a recorded log, or of a file of `vnext-replay convert`, at their times.

Owns what a tokenizer makes of another one's tokens: a log without texts has pseudonyms, equal where the texts were, and a trace has
lengths. Such tokens become tokens with some text, equal ones equal, so that prompts share what they shared.
"""

from __future__ import annotations

from pathlib import Path

from vnext.commands.bench.datasets import Sample
from vnext.commands.bench.workload import plain_ids
from vnext.replay.answers.convert import answers_of, arrivals_in
from vnext.replay.reading.source import UnusableLog
from vnext.runtime.protocol.settings import SettingsError
from vnext.state.events import RequestArrived, unpack_tokens
from vnext.text.tokenizer import Tokenizer


def log_samples(path: Path, count: int, tokenizer: Tokenizer) -> list[Sample]:
    """The first `count` requests, each due as long after the first one as in the log, with an answer as long as there. Raises
    SettingsError."""
    try:
        log, arrivals = arrivals_in(path)
        lengths, found = answers_of(log) if log is not None else {}, list(arrivals)[:count]
    except UnusableLog as error:
        raise SettingsError(f"--from-log: {error}.") from error
    if not found:
        raise SettingsError(f"--from-log {path} holds no request.")
    pool = plain_ids(tokenizer)
    found.sort(key=lambda each: each.arrival_ns)
    return [_sample(each, lengths, tokenizer, pool, found[0].arrival_ns) for each in found]


def _sample(
    event: RequestArrived, lengths: dict[int, int], tokenizer: Tokenizer, pool: list[int], began_ns: int
) -> Sample:
    tokens = unpack_tokens(event.prompt).tolist()
    if max(tokens) >= tokenizer.vocab_size:
        tokens = [pool[token % len(pool)] for token in tokens]
    output_tokens = lengths.get(event.id, event.sampling.max_tokens)
    return Sample(tokens, len(tokens), output_tokens, (event.arrival_ns - began_ns) / 1e9)
