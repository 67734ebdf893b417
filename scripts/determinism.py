"""Compare the tokens of a request run alone with those in other circumstances: `python scripts/determinism.py --model demo`.

Owns the circumstances (neighbours, chunks, preemptions, caches, threads, ranks, drafts, another start) and the record. A
circumstance counts only if the run's log or answers prove that it occurred. Every token is compared with the token of the same
request run alone; the first difference ends the run with status 1. Each model, level and kind of cache is an entry of the record.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import tempfile
import time
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import msgspec
from random_mixed import MIXED, write_mixed
from random_model import SHAPES, write_checkpoint

from vnext.api.llm import LLM, Generated
from vnext.base.version import __version__
from vnext.commands.machine import machine
from vnext.kernels.cpu import native
from vnext.kernels.format import QUANTIZATIONS
from vnext.log.codec import Frame
from vnext.models.config.model_config import ModelConfig, load_config
from vnext.models.layers.sharding import sums_alike
from vnext.models.loading.gguf_out import GgufQuantiser
from vnext.models.loading.quantise import SCHEMES, Quantiser
from vnext.options.reader import GGUF_SCHEMES
from vnext.replay.reading.info import info
from vnext.replay.reading.source import open_log
from vnext.runtime.processes.launch import DEMO_MODEL, StartRefused, model_folder
from vnext.runtime.protocol.sampling_params import SamplingParams
from vnext.state.events import StepCommitted

STRANGERS = 40
PREEMPTED = {"num_blocks_override": 120, "max_num_seqs": 64}
SHARED_BEGINNING = 40
DRAFTED = {"method": "ngram", "num_speculative_tokens": 4, "row_cost": 0}
OWN_DRAFTS, HEAD_DRAFTS = "with drafts of its own layer", "with drafts of an EAGLE-3 head"

Ask = Callable[[LLM], list[Generated]]


class Circumstance(msgspec.Struct, frozen=True, kw_only=True):
    """How to run the requests (together or one by one), the engine's settings, and what must be observed."""

    name: str
    settings: dict[str, Any] = {}
    together: bool = True
    turned: bool = False
    warm: bool = False
    preempts: bool = False
    drafts: bool = False


class Numbers(msgspec.Struct, frozen=True, kw_only=True):
    """How an engine stores and multiplies numbers: its settings of these names."""

    dtype: str
    quantization: str
    activations: str
    kv_cache_dtype: str
    isa: str


ALONE = Circumstance(name="alone", together=False, settings={"enable_prefix_caching": False})
CIRCUMSTANCES = (
    Circumstance(name="alone in another start, one thread", together=False, settings={"threads": 1}),
    Circumstance(name="among strangers"),
    Circumstance(name="among strangers, in the other order", turned=True, settings={"executor": "mp"}),
    Circumstance(name="in chunks", settings={"max_num_batched_tokens": 32, "long_prefill_token_threshold": 7}),
    Circumstance(name="preempted", settings=PREEMPTED, preempts=True),
    Circumstance(name="without a prefix cache", settings={"enable_prefix_caching": False}),
    Circumstance(name="with a warm prefix cache", warm=True),
    Circumstance(name="in step, blocks of 32", settings={"async_scheduling": False, "block_size": 32}),
    Circumstance(name="with drafts", settings={"speculative_config": DRAFTED}, drafts=True),
)


class Requests:
    """The requests, equal in every circumstance: every third is greedy, each of the others samples with its own seed."""

    def __init__(self, count: int, token_count: int) -> None:
        self.count = count
        self.token_count = token_count

    def prompt(self, index: int) -> list[int]:
        """Return 3 to 120 tokens; every fourth prompt shares a prefix with others."""
        shared = [7 + 11 * place % 400 for place in range(SHARED_BEGINNING)] if index % 4 == 0 else []
        return shared + [5 + (13 * index + 7 * place + place * place // 3) % 500 for place in range(3 + index * 7 % 117)]

    def params(self, index: int) -> SamplingParams:
        temperature, top_k = (0.0, -1) if index % 3 == 0 else (0.9, 50 if index % 3 == 1 else -1)
        return SamplingParams(
            temperature=temperature, top_p=0.95, top_k=top_k, seed=index, max_tokens=self.token_count, ignore_eos=True
        )

    def alone(self, llm: LLM) -> list[Generated]:
        """Run the requests one after the other."""
        return [
            llm.generate([self.prompt(index)], [self.params(index)], use_tqdm=False)[0] for index in range(self.count)
        ]

    def together(self, llm: LLM, turned: bool) -> list[Generated]:
        """Run all requests at once, with unrelated requests before and after them."""
        order = range(self.count - 1, -1, -1) if turned else range(self.count)
        strangers = [10_000 + index for index in range(STRANGERS)]
        everybody = [*strangers[::2], *order, *strangers[1::2]]
        answers = llm.generate(list(map(self.prompt, everybody)), list(map(self.params, everybody)), use_tqdm=False)
        found = dict(zip(everybody, answers))
        return [found[index] for index in range(self.count)]


def main() -> int:
    options = parsed()
    models = ["demo", *SHAPES, *MIXED] if options.model == ["all"] else options.model
    levels = [level.name.lower() for level in native.levels()] if options.isa == ["all"] else options.isa
    requests = Requests(options.requests, options.tokens)
    before = machine()
    if options.head and len(models) > 1:
        raise SystemExit("--head drafts for one model: name one with --model")
    for name, isa, activations, kind in product(models, levels, options.activations, options.kv_cache_dtype):
        scheme = name.partition(":")[2]
        quantization = scheme if scheme in QUANTIZATIONS else options.quantization
        numbers = Numbers(dtype=options.dtype, quantization=quantization, activations=activations, kv_cache_dtype=kind, isa=isa)
        with tempfile.TemporaryDirectory(prefix="vnext-determinism-") as folder:
            found = examine(name, requests, numbers, Path(folder), options.head)
        if options.json:
            add_to_record(options.json, described(name, numbers), found, options, before)
        if found["different"]:
            return 1
    return 0


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    known = f"demo, {', '.join((*SHAPES, *MIXED))} (random weights), all of these, or a folder or file"
    schemes = "NAME:w4a16 or NAME:q4_k_m is quantised first, NAME:int8 loaded so"
    parser.add_argument("--model", nargs="+", default=["demo"], help=f"{known}; {schemes}")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--quantization", default="none")
    parser.add_argument("--activations", nargs="+", default=["auto"], help="auto, int8, bf16, or several, one after the other")
    parser.add_argument("--kv-cache-dtype", nargs="+", default=["auto"], help="auto, int8, or both, one after the other")
    parser.add_argument("--isa", nargs="+", default=["auto"], help="instruction sets of the CPU kernels, or all of this machine")
    parser.add_argument("--requests", type=int, default=90)
    parser.add_argument("--tokens", type=int, default=80, help="of each answer")
    parser.add_argument("--head", type=Path, help="folder of an EAGLE-3 head that drafts for the model in one more circumstance")
    parser.add_argument("--json", type=Path, help="record to begin or to add to")
    return parser.parse_args()


def described(name: str, numbers: Numbers) -> str:
    """The name of a model's entry in the record."""
    weights = "" if numbers.quantization in ("none", "auto") else f", {numbers.quantization}"
    met = "" if numbers.activations == "auto" else f", activations in {numbers.activations}"
    cache = "" if numbers.kv_cache_dtype == "auto" else f", keys and values in {numbers.kv_cache_dtype}"
    level = "" if numbers.isa == "auto" else f", {numbers.isa}"
    return Path(name.partition(":")[0] if weights else name).name + weights + met + cache + level


def examine(name: str, requests: Requests, numbers: Numbers, folder: Path, head: Path | None = None) -> dict[str, Any]:
    """Run all circumstances of one model and print progress. `head` drafts in one of them."""
    path = model_of(name, folder)
    config = load_config(model_folder(path))
    ranks = next((count for count in (2, 3) if sums_alike(config, count)), 1)
    common = {**msgspec.structs.asdict(numbers), "executor": "inproc", "log": "shape"}
    title = described(name, numbers)
    expected, environment, seconds = run(path, ALONE, requests, common, folder / "alone")
    say(title, ALONE.name, sum(map(len, expected)), seconds)
    compared, different, refused = {}, [], {}
    for place, circumstance in enumerate((*CIRCUMSTANCES, *drafted(config, head), *on_ranks(ranks, config))):
        try:
            found, _, seconds = run(path, circumstance, requests, common, folder / str(place))
        except StartRefused as error:
            refused[circumstance.name] = str(error)
            print(f"{title}: {circumstance.name}: {error}", flush=True)
            continue
        wrong = [index for index in range(requests.count) if found[index] != expected[index]]
        compared[circumstance.name] = sum(map(len, found))
        say(title, circumstance.name, compared[circumstance.name], seconds, wrong)
        different += [{"circumstance": circumstance.name, "requests": wrong}] if wrong else []
    return {
        "tokens_compared": sum(compared.values()),
        "circumstances": compared,
        "different": different,
        "refused": refused,
        "environment": environment,
    }


def drafted(config: ModelConfig, head: Path | None) -> list[Circumstance]:
    """With what the model has to draft, and with a head for it."""
    given = {"num_speculative_tokens": 3, "row_cost": 0}
    ways: dict[str, dict[str, Any]] = {OWN_DRAFTS: {"method": "mtp"}} if config.mtp_layers else {}
    if head is not None:
        ways[HEAD_DRAFTS] = {"method": "eagle3", "model": str(head.resolve())}
    return [Circumstance(name=name, settings={"speculative_config": given | way}, drafts=True) for name, way in ways.items()]


def on_ranks(ranks: int, config: ModelConfig) -> list[Circumstance]:
    """Several ranks, and of a model with experts also whole ones on each."""
    settings = {"tensor_parallel_size": ranks, "executor": "mp"}
    whole = Circumstance(name=f"with whole experts on {ranks} ranks", settings={**settings, "enable_expert_parallel": True})
    found = [Circumstance(name=f"on {ranks} ranks", settings=settings), *([whole] if config.experts else [])]
    return found if ranks > 1 else []


def model_of(name: str, folder: Path) -> str:
    """The folder or file of a model, made in `folder` where it must be."""
    model, _, scheme = name.partition(":")
    path = str(DEMO_MODEL) if model == "demo" else model
    if model in SHAPES:
        path = str(folder / "model")
        write_checkpoint(SHAPES[model], Path(path))
    if model in MIXED:
        path = str(folder / "model")
        write_mixed(MIXED[model], Path(path))
    if scheme in GGUF_SCHEMES:
        list(GgufQuantiser(Path(path), folder / "quantised.gguf", scheme, {}).run())
        return str(folder / "quantised.gguf")
    if scheme not in SCHEMES:
        return path
    list(Quantiser(Path(path), folder / "quantised", scheme, 0).run())
    return str(folder / "quantised")


def run(
    path: str, circumstance: Circumstance, requests: Requests, common: dict[str, Any], log_dir: Path
) -> tuple[list[list[int]], dict[str, str], float]:
    """Return the requests' tokens, the engine's description of itself and the seconds taken.

    Raises AssertionError if the circumstance did not occur.
    """
    began_s = time.monotonic()
    with LLM(path, log_dir=str(log_dir), **(common | circumstance.settings)) as llm:
        for _ in range(2 if circumstance.warm else 1):
            answers = requests.together(llm, circumstance.turned) if circumstance.together else requests.alone(llm)
        folder = Path(llm.log_dir)
    seen = info(open_log(folder))
    if circumstance.warm:
        assert sum(answer.num_cached_tokens > 0 for answer in answers) > requests.count // 2, "the cache stayed cold"
    if circumstance.preempts:
        assert seen.preemptions > 0, "nothing was preempted: make the cache smaller"
    if circumstance.drafts:
        frames = (item for item in open_log(folder).items() if isinstance(item, Frame))
        events = (event for frame in frames for event in frame.events)
        assert any(isinstance(event, StepCommitted) and any(event.drafted) for event in events), "nothing was drafted"
    if circumstance.together:
        assert max(seen.batch_percentiles) > 1, "no two requests met in a step"
    tokens = [answer.outputs[0].token_ids for answer in answers]
    assert all(len(answer) == requests.token_count for answer in tokens), "an answer is short"
    return tokens, seen.header.started.environment, time.monotonic() - began_s


def say(model: str, name: str, count: int, seconds: float, wrong: list[int] | None = None) -> None:
    verdict = "the measure of the others" if wrong is None else f"{len(wrong)} requests differ: {wrong[:9]}" if wrong else "equal"
    print(f"{model}: {name}: {count:,} tokens, {verdict} ({seconds:.0f} s)", flush=True)


def add_to_record(path: Path, key: str, found: dict[str, Any], options: argparse.Namespace, before: Any) -> None:
    """Begin the record, or add this entry to it."""
    record = json.loads(path.read_text()) if path.is_file() else {
        "command": "python scripts/determinism.py " + shlex.join(sys.argv[1:]).replace(str(path), "RECORD"),
        "measured_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "vnext": __version__,
        "machine": msgspec.to_builtins(before),
        "models": {},
    }  # fmt: skip
    record["models"][key] = {"requests": options.requests, "tokens": options.tokens, **found}
    record["tokens_compared"] = sum(each["tokens_compared"] for each in record["models"].values())
    record["requests_that_differ"] = sum(len(each["different"]) for each in record["models"].values())
    path.write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    sys.exit(main())
