"""How far caches of int8 lead from those of the activations' dtype, token by token: `python -m perf.kv_divergence --json FILE`.

An engine with `--kv-cache-dtype auto` answers greedily; engines of both dtypes then score the same answers. So every token is compared
after the same tokens before it: how often the likeliest token is another one, and by how much log-probabilities differ. The
engine with int8 also answers on its own: the share of its answers' tokens that are others, and of answers that stay the same.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from vnext import LLM, SamplingParams
from vnext.api.generated import Generated, Logprob
from vnext.base.version import __version__
from vnext.commands.machine import machine

TEXTS = ("The first page of the book", "One of the rivers of the country", "A name is a word that", "The cache of an engine holds", "In the year")
SCORED = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=1)


def prompts(count: int) -> list[str]:
    """Of several lengths, no two alike."""
    return [f"{index} " + (TEXTS[index % len(TEXTS)] + " ") * (1 + index % 9) for index in range(count)]


def likeliest(entry: dict[int, Logprob]) -> int:
    return min(entry, key=lambda token: entry[token].rank)


def compared(plain: list[Generated], rounded: list[Generated], begins: list[int]) -> dict[str, Any]:
    """The answers' tokens, from `begins` on, as both engines score them."""
    others, differences = 0, []
    for one, other, begin in zip(plain, rounded, begins, strict=True):
        for place in range(begin, len(one.prompt_token_ids)):
            token, entry, given = one.prompt_token_ids[place], one.prompt_logprobs[place], other.prompt_logprobs[place]
            others += likeliest(entry) != likeliest(given)
            differences.append(abs(entry[token].logprob - given[token].logprob))
    found = np.array(differences)
    return {
        "tokens_scored": len(found),
        "likeliest_token_differs": round(others / len(found), 5),
        "log_probability_differs_by": {
            "mean": round(float(found.mean()), 5), "p99": round(float(np.quantile(found, 0.99)), 5), "max": round(float(found.max()), 5),
        },
    }  # fmt: skip


def measure(model: str, dtype: str, count: int, tokens: int) -> dict[str, Any]:
    greedy = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)
    answers, scores = {}, {}
    for kind in ("auto", "int8"):
        with LLM(model, dtype=dtype, kv_cache_dtype=kind, enable_prefix_caching=False) as llm:
            answers[kind] = llm.generate(prompts(count), greedy, use_tqdm=False)
            whole = [[*each.prompt_token_ids, *each.outputs[0].token_ids] for each in answers["auto"]]
            scores[kind] = llm.generate(whole, SCORED, use_tqdm=False)
    pairs = [(one.outputs[0].token_ids, other.outputs[0].token_ids) for one, other in zip(*answers.values(), strict=True)]
    differs = sum(a != b for one, other in pairs for a, b in zip(one, other, strict=True))
    begins = [len(each.prompt_token_ids) for each in answers["auto"]]
    free = {"tokens_that_differ": round(differs / (count * tokens), 5), "answers_alike": sum(one == other for one, other in pairs)}
    return {"answers": count, "tokens_each": tokens, "after_the_same_tokens": compared(*scores.values(), begins), "on_its_own": free}


def main() -> None:
    """Print the comparison, and write the record."""
    options = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    options.add_argument("--model", default="", help="a folder or hub id (default: the bundled model)")
    options.add_argument("--dtype", default="bfloat16")
    options.add_argument("--answers", type=int, default=40)
    options.add_argument("--tokens", type=int, default=100, help="of each answer")
    options.add_argument("--json", type=Path, help="file for the record")
    given, before = options.parse_args(), machine()
    found = measure(given.model, given.dtype, given.answers, given.tokens)
    print(json.dumps(found, indent=2))
    if given.json:
        command = f"python -m perf.kv_divergence --dtype {given.dtype} --answers {given.answers} --tokens {given.tokens}"
        record = {"command": command, "measured_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), "vnext": __version__}
        record |= {"machine": msgspec.to_builtins(before), "model": Path(given.model).name or "demo", **found}
        given.json.write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()
