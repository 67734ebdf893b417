"""What drafts gain and cost: answers with and without them, by turns, in engines side by side.

    python -m perf.drafts --json FILE [--model FOLDER] [--draft-model FOLDER]
    python -m perf.drafts --json FILE --pair

Three tasks: an edit (the prompt ends in the beginning of a text that it holds), ordinary text, and JSON by a schema. Each round
asks every engine for the same answers; a ratio is the time without drafts over the time with them in one round. All tokens are
compared. A random model's answers repeat themselves more than a real one's.

With `--pair` the model is a random one of 135M parameters, with a draft model of its first layers (draft_pair.py), the task
ordinary text and the batch 1; the share of drafts that were kept comes from a run of its own with a log.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from transformers import AutoModelForCausalLM

import vnext
from perf.draft_pair import write_pair
from vnext import LLM, SamplingParams
from vnext.commands.machine import machine
from vnext.log.codec import Frame
from vnext.replay.reading.source import open_log
from vnext.runtime.protocol.sampling_params import StructuredOutputsParams
from vnext.sampling.drafters.drafter import drafter_of
from vnext.state.config import Speculation
from vnext.state.events import StepCommitted

Task = Callable[[int, float], tuple[list[str], list[SamplingParams]]]
ROOT = Path(__file__).resolve().parents[1]
ENGINES = {
    "plain": "", "ngram 4": {"num_speculative_tokens": 4}, "ngram 8": {"num_speculative_tokens": 8},
    "suffix 8": {"method": "suffix", "num_speculative_tokens": 8, "suffix_decoding_max_cached_requests": 0},  # rounds repeat answers
}  # fmt: skip
PLAIN = {"plain": ""}
DRAFT_MODEL_DRAFTS = (2, 3, 5)
TOKENS, LENGTH_MAX = 80, 1024
SAMPLES, SAMPLED_AT = 24, 0.8
SCHEMA = {
    "type": "object",
    "properties": {
        "first_name": {"type": "string", "maxLength": 8}, "age_in_years": {"type": "integer", "minimum": 0, "maximum": 99},
        "favourite_colours": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "minItems": 2, "maxItems": 2},
        "is_a_member": {"type": "boolean"},
    },
    "required": ["first_name", "age_in_years", "favourite_colours", "is_a_member"], "additionalProperties": False,
}  # fmt: skip


def main() -> None:
    """Measure and write the record."""
    options = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    options.add_argument("--json", type=Path, help="file for the record")
    options.add_argument("--rounds", type=int, default=5)
    options.add_argument("--batches", default="1,8,32")
    options.add_argument("--tasks", default=",".join(TASKS))
    options.add_argument("--model", default="", help="a folder or hub id (default: the bundled model)")
    options.add_argument("--draft-model", default="", help="a folder or hub id: engines with it as draft model, too")
    options.add_argument("--pair", action="store_true", help="a random model and its first layers, made for this run")
    chosen = options.parse_args()
    if not chosen.pair:
        tasks = {name: TASKS[name] for name in chosen.tasks.split(",")}
        return measure(chosen, tasks, list(map(int, chosen.batches.split(","))))
    with tempfile.TemporaryDirectory() as folder:
        chosen.model, chosen.draft_model = map(str, write_pair(Path(folder)))
        measure(chosen, {"ordinary": ordinary}, [1])


def measure(chosen: argparse.Namespace, tasks: dict[str, Task], batches: list[int]) -> None:
    """Measure these tasks and write the record."""
    drafting = {
        f"draft model {most}": {"method": "draft_model", "model": chosen.draft_model, "num_speculative_tokens": most}
        for most in (DRAFT_MODEL_DRAFTS if chosen.draft_model else ())
    }
    record: dict[str, Any] = {
        "command": "python -m perf.drafts", "model": Path(chosen.model).name or "demo", "machine": msgspec.to_builtins(machine()),
        "tokens_each": TOKENS, "results": [],
    }  # fmt: skip
    with ExitStack() as stack:
        engines = {
            name: stack.enter_context(LLM(chosen.model, threads=1, log="off", max_model_len=LENGTH_MAX, speculative_config=config))
            for name, config in ((PLAIN if chosen.pair else ENGINES) | drafting).items()
        }
        for task in tasks:
            for batch in batches:
                for temperature in (0.0, 0.8):
                    record["results"].append(found := measured(engines, task, batch, temperature, chosen.rounds))
                    print(found, flush=True)
        if not chosen.pair:
            record["acceptance"] = acceptance(engines["plain"], chosen.model or str(Path(vnext.__file__).parent / "demo_model"))
            print(record["acceptance"], flush=True)
    if drafting:
        record["kept"] = {str(temperature): kept_share(chosen, temperature) for temperature in (0.0, 0.8)}
        print(record["kept"], flush=True)
    if chosen.json:
        chosen.json.write_text(json.dumps(record, indent=1) + "\n")


def measured(engines: dict[str, LLM], task: str, batch: int, temperature: float, rounds: int) -> dict[str, Any]:
    """The ratios of one task; the first round warms up. Each round begins with another engine and compares the tokens."""
    seconds: dict[str, list[float]] = {name: [] for name in engines}
    prompts, params = TASKS[task](batch, temperature)
    for round_ in range(rounds + 1):
        answers = {}
        order = list(engines.items())
        for name, llm in order[round_ % len(order) :] + order[: round_ % len(order)]:
            began_s = time.perf_counter()
            found = llm.generate(prompts, params, use_tqdm=False)
            if round_:
                seconds[name].append(time.perf_counter() - began_s)
            answers[name] = [answer.outputs[0].token_ids for answer in found]
        assert all(each == answers["plain"] for each in answers.values()), "drafts have changed an answer"
    plain, count = seconds.pop("plain"), sum(map(len, answers["plain"]))
    ratios = {name: [one / other for one, other in zip(plain, drafted)] for name, drafted in seconds.items()}
    return {
        "task": task, "batch": batch, "temperature": temperature, "plain_tokens_per_s": round(count / statistics.median(plain), 1),
        "ratio_median": {name: round(statistics.median(each), 3) for name, each in ratios.items()},
        "ratios": {name: [round(ratio, 3) for ratio in each] for name, each in ratios.items()},
    }  # fmt: skip


def kept_share(chosen: argparse.Namespace, temperature: float) -> dict[str, Any]:
    """Of the answer at batch 1, the share of the draft model's drafts that were kept, and of its first ones; it always makes three."""
    config = {"method": "draft_model", "model": chosen.draft_model, "num_speculative_tokens": 3, "row_cost": 0}
    with tempfile.TemporaryDirectory() as folder:
        with LLM(chosen.model, threads=1, log="shape", log_dir=folder, max_model_len=LENGTH_MAX, speculative_config=config) as llm:
            llm.generate(*ordinary(1, temperature), use_tqdm=False)
        frames = [item for item in open_log(Path(llm.log_dir)).items() if isinstance(item, Frame)]
    commits = [event for frame in frames for event in frame.events if isinstance(event, StepCommitted) and any(event.drafted)]
    runs = [(count - 1, drafted) for event in commits for count, drafted in zip(event.counts, event.drafted) if drafted]
    kept, drafted = map(sum, zip(*runs))
    first = sum(count > 0 for count, _ in runs) / len(runs)
    return {"drafts": drafted, "kept": round(kept / drafted, 4), "first_kept": round(first, 4)}


def acceptance(llm: LLM, model_path: str) -> dict[str, Any]:
    """Of each drafter: how many first drafts it made, the share of right ones, and the mean probability of the drafted tokens, over
    answers sampled at temperature 0.8. A drafter that names one token cannot be right more often than the model draws that token;
    the mean probability of the likeliest tokens bounds every such drafter."""
    prompts = [make(SAMPLES, SAMPLED_AT)[0] for make in (edit, ordinary)]
    params = [SamplingParams(temperature=SAMPLED_AT, seed=at, max_tokens=4 * TOKENS, ignore_eos=True) for at in range(2 * SAMPLES)]
    answers = llm.generate(sum(prompts, []), params, use_tqdm=False)
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
    drafters = {method: drafter_of(Speculation(num_speculative_tokens=1, method=method, row_cost=0)) for method in ("ngram", "suffix")}
    found: dict[str, list[tuple[int, float]]] = {name: [] for name in drafters}
    likeliest: list[float] = []
    for answer in answers:
        prompt = np.array(answer.prompt_token_ids, np.int32)
        tokens = np.concatenate([prompt, np.array(answer.outputs[0].token_ids, np.int32)])
        with torch.inference_mode():
            probabilities = (model(torch.from_numpy(tokens)[None].long()).logits[0] / SAMPLED_AT).softmax(-1)
        likeliest += probabilities[len(prompt) - 1 : -1].amax(-1).tolist()
        for name, drafter in drafters.items():
            row = drafter.row(b"", len(prompt))
            for length in range(len(prompt), len(tokens)):
                for draft in row.drafts(tokens[:length], 1):
                    found[name].append((int(draft == tokens[length]), float(probabilities[length - 1, draft])))
            row.finish(tokens)
    return {
        "temperature": SAMPLED_AT, "tokens": len(likeliest), "likeliest": round(statistics.mean(likeliest), 4),
        **{name: {
            "drafts": len(each), "right": round(statistics.mean(right for right, _ in each), 4),
            "bound": round(statistics.mean(bound for _, bound in each), 4),
        } for name, each in found.items()},
    }  # fmt: skip


def edit(batch: int, temperature: float) -> tuple[list[str], list[SamplingParams]]:
    """A text, and its beginning once more."""
    text = (ROOT / "vnext" / "state" / "windows.py").read_text()[600:1500]
    prompts = [f"{text}\n# once more, number {at}:\n{text[: 60 + 7 * (at % 8)]}" for at in range(batch)]
    return prompts, _params(batch, temperature)


def ordinary(batch: int, temperature: float) -> tuple[list[str], list[SamplingParams]]:
    text = (ROOT / "README.md").read_text()
    return [text[97 * at : 97 * at + 200] for at in range(batch)], _params(batch, temperature)


def schema(batch: int, temperature: float) -> tuple[list[str], list[SamplingParams]]:
    asked = StructuredOutputsParams(json=SCHEMA, disable_any_whitespace=True)
    return [f"Person number {at}:" for at in range(batch)], [
        SamplingParams(temperature=temperature, seed=at, max_tokens=TOKENS, structured_outputs=asked) for at in range(batch)
    ]


def _params(batch: int, temperature: float) -> list[SamplingParams]:
    return [SamplingParams(temperature=temperature, seed=at, max_tokens=TOKENS, ignore_eos=True) for at in range(batch)]


TASKS = {"edit": edit, "ordinary": ordinary, "schema": schema}

if __name__ == "__main__":
    main()
