"""What constraints cost: the mask of a large vocabulary, and the throughput of constrained answers beside free ones.

    python -m perf.constraints --json FILE

The mask: a JSON schema over a vocabulary of 128,000 random words, one mask a token along random valid answers. The
throughput: the bundled model answers 32 requests with a schema and the same 32 without one, by turns in one engine, with
equal numbers of tokens.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
from llguidance import LLMatcher
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from vnext import LLM, SamplingParams
from vnext.commands.machine import machine
from vnext.runtime.protocol.sampling_params import StructuredOutputsParams
from vnext.sampling.constraint import Matcher, Vocabulary
from vnext.state.params import Constraint

VOCABULARY, ANSWERS, ANSWER_TOKENS_MAX = 128_000, 40, 200
REQUESTS, TOKENS = 32, 64
SCHEMA = {
    "type": "object",
    "properties": {
        "title": {"type": "string", "maxLength": 60},
        "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "minItems": 2, "maxItems": 6},
        "count": {"type": "integer", "minimum": 0, "maximum": 9999},
        "notes": {"type": "array", "items": {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]}},
    },
    "required": ["title", "tags", "count", "notes"],
    "additionalProperties": False,
}
LONG = {"type": "array", "items": {"type": "string", "minLength": 20, "maxLength": 30}, "minItems": 100, "maxItems": 200}


def main() -> None:
    """Measure and write the record."""
    options = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    options.add_argument("--json", type=Path, help="file for the record")
    options.add_argument("--rounds", type=int, default=7)
    options.add_argument("--model", default="", help="a folder or hub id (default: the bundled model)")
    chosen = options.parse_args()
    record = {
        "command": "python -m perf.constraints", "machine": msgspec.to_builtins(machine()),
        "mask_us": mask_times(), "throughput": throughput(chosen.model, chosen.rounds),
    }  # fmt: skip
    text = json.dumps(record, indent=1)
    print(text)
    if chosen.json:
        chosen.json.write_text(text + "\n")


def mask_times() -> dict[str, float]:
    """Microseconds of a token: the grammar goes on by one token, and the mask of the next one is made."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        large_tokenizer().save(str(folder / "tokenizer.json"))
        vocabulary = Vocabulary(folder, VOCABULARY, (0,))
        began_s = time.perf_counter()
        assert vocabulary.tokenizer.vocab_size == VOCABULARY
        loaded_s = time.perf_counter() - began_s
        taken = sorted(each for seed in range(ANSWERS) for each in answer_times(vocabulary, random.Random(seed)))
    p50, p99 = (1e6 * taken[int(len(taken) * share)] for share in (0.5, 0.99))
    return {
        "p50": round(p50, 1), "p99": round(p99, 1), "max": round(1e6 * taken[-1], 1), "masks": len(taken),
        "vocabulary_loaded_s": round(loaded_s, 2),
    }  # fmt: skip


def large_tokenizer() -> Tokenizer:
    """Every byte, and random words of two to ten letters, with and without a space before them."""
    rng, letters = random.Random(1), sorted(pre_tokenizers.ByteLevel.alphabet())
    words = ["<end>", *letters]
    known = set(words)
    while len(words) < VOCABULARY:
        word = rng.choice(("", "Ġ")) + "".join(rng.choices("etaoinshrdlucmfwypvbgkjqxz", k=rng.randint(2, 10)))
        if word not in known:
            known.add(word)
            words.append(word)
    made = Tokenizer(models.BPE(vocab={word: at for at, word in enumerate(words)}, merges=[]))
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    made.add_special_tokens(["<end>"])
    return made


def answer_times(vocabulary: Vocabulary, rng: random.Random) -> Iterator[float]:
    """Seconds of each mask along one random answer."""
    matcher = Matcher(Constraint(grammar=LLMatcher.grammar_from_json_schema(SCHEMA)), vocabulary)
    token, mask = -1, vocabulary.everything.copy()
    for _ in range(ANSWER_TOKENS_MAX):
        began_s = time.perf_counter()
        if token >= 0:
            matcher.take(token)
        matcher.fill(mask)
        yield time.perf_counter() - began_s
        token = int(rng.choice(np.flatnonzero(np.unpackbits(mask.view(np.uint8), count=VOCABULARY, bitorder="little"))))
        if token == 0:
            return


def throughput(model: str, rounds: int) -> dict[str, object]:
    """Tokens a second of constrained and of free answers, by turns, and the ratios."""
    bound = SamplingParams(
        temperature=1.0, max_tokens=TOKENS, structured_outputs=StructuredOutputsParams(json=json.dumps(LONG))
    )
    free = SamplingParams(temperature=1.0, max_tokens=TOKENS, ignore_eos=True)
    rates: dict[str, list[float]] = {"constrained": [], "free": []}
    with LLM(model, log="off", enable_prefix_caching=False) as llm:
        for round_ in range(rounds + 1):
            prompts = [f"The list of {round_} and {at} is" for at in range(REQUESTS)]
            for name, params in (("constrained", bound), ("free", free)):
                rate = rate_of(llm, prompts, params)
                if round_:  # the first round warms up
                    rates[name].append(rate)
    ratios = [one / other for one, other in zip(rates["constrained"], rates["free"])]
    return {
        "model": Path(model).name or "demo", "requests": REQUESTS, "tokens_each": TOKENS, "ratio_median": round(statistics.median(ratios), 3),
        "ratios": [round(ratio, 3) for ratio in ratios],
        "tokens_per_s": {name: round(statistics.median(found), 1) for name, found in rates.items()},
    }  # fmt: skip


def rate_of(llm: LLM, prompts: list[str], params: SamplingParams) -> float:
    """Tokens a second."""
    began_s = time.perf_counter()
    answers = llm.generate(prompts, params)
    seconds = time.perf_counter() - began_s
    count = sum(len(answer.outputs[0].token_ids) for answer in answers)
    assert count == len(prompts) * TOKENS, f"{count} tokens: every answer must have {TOKENS}"
    return count / seconds


if __name__ == "__main__":
    main()
