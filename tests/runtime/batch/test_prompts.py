"""What requests want of their prompts: transformers' figures, and the same bits however the prompt is computed."""

from __future__ import annotations

from collections import defaultdict
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from device_twin import TwinDevice
from msgspec.structs import replace
from rank_drive import device_rank, drive, host_rank, runner_of, some_arrivals, started_with
from transformers import AutoModelForCausalLM

from vnext.kernels.table import operations, plain_operations
from vnext.runtime.batch import prompt_results, prompt_tensors, prompts
from vnext.runtime.gpu.buckets import Shapes
from vnext.runtime.gpu.steps import DeviceVariants
from vnext.runtime.processes.launch import DEMO_MODEL
from vnext.runtime.protocol.messages import PromptResult, TokenLogprobs
from vnext.runtime.rank.replica import Rank
from vnext.runtime.rank.runner import ModelRunner
from vnext.sampling.sampling import sampler_for
from vnext.state.events import RequestArrived, unpack_tokens
from vnext.state.params import POOLINGS
from vnext.state.state import Request
from vnext.text.prompt_arrays import embedding
from vnext.text.prompt_results import prompt_logprobs

SCORED = {"prompt_logprobs": 2}
WISHES = [SCORED, {"pooling": 1}, {}, {"pooling": 2}, {"prompt_logprobs": 0}, {"pooling": 3}, {"pooling": 4}, {"pooling": 2, **SCORED}]
Found = tuple[list[TokenLogprobs | None], list[float]]


def arrivals(count: int = 14) -> list[RequestArrived]:
    """Requests of all kinds, of which every third begins as the others do, and whose prompts are in the cache soon."""
    some = some_arrivals(count, seed=3)
    return [replace(each, sampling=replace(each.sampling, **WISHES[at % 8])) for at, each in enumerate(some)]


def results(rank: Rank, monkeypatch: pytest.MonkeyPatch, given: list[RequestArrived], runner: ModelRunner, **changes) -> dict:
    """Each request's scores and embedding, whatever the order in which parts came."""
    found: dict[int, list[PromptResult]] = defaultdict(list)
    collect = Rank.collect

    def collected(self: Rank) -> list:
        completed = collect(self)
        for result in completed:
            for part in result.prompts:
                found[part.id].append(part)
        return completed

    with monkeypatch.context() as patch:
        patch.setattr(Rank, "collect", collected)
        drive(rank, started_with(runner, **changes), given)
    lengths = {each.id: len(each.prompt) // 4 for each in given}
    return {id_: seen(parts, lengths[id_]) for id_, parts in found.items()}


def seen(parts: list[PromptResult], length: int) -> Found:
    pooled = [part for part in parts if part.hidden]
    scored = [part for part in parts if part.logprobs]
    assert len({part.hidden for part in pooled}) <= 1, "a repeated embedding has the same bits"
    return prompt_logprobs(scored, length), embedding(pooled, None, normalize=False).tolist() if pooled else []


@pytest.fixture(scope="module")
def runner() -> ModelRunner:
    return runner_of()


@pytest.fixture(scope="module")
def whole(runner: ModelRunner) -> dict[int, Found]:
    """Each prompt in one step, in step."""
    with pytest.MonkeyPatch.context() as patch:
        return results(host_rank(runner), patch, arrivals(), runner, max_num_batched_tokens=400, pipeline_depth=1)


@pytest.mark.parametrize("path", [DEMO_MODEL, None], ids=["demo", "stories260k"])
def test_figures_are_those_of_transformers(path: Path | None, request: pytest.FixtureRequest) -> None:
    path = path or request.getfixturevalue("stories_path")
    runner, given = runner_of(path), arrivals()
    with pytest.MonkeyPatch.context() as patch:
        found = results(host_rank(runner), patch, given, runner)
    oracle = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    assert len(found) == 12
    for each in given:
        if each.id in found:
            check(each, *found[each.id], oracle)


def check(arrival: RequestArrived, entries: list[TokenLogprobs | None], hidden: list[float], oracle: torch.nn.Module) -> None:
    tokens, sampling = torch.tensor(unpack_tokens(arrival.prompt).astype(np.int64))[None], arrival.sampling
    with torch.inference_mode():
        expected = oracle(tokens, output_hidden_states=True)
    logprobs, states = expected.logits[0].log_softmax(-1), expected.hidden_states[-1][0]
    assert entries[0] is None
    for at, entry in enumerate(entries[1:], 1):
        assert (entry is None) == (sampling.prompt_logprobs < 0)
        if entry is not None:
            right = logprobs[at - 1]
            assert entry.logprob == pytest.approx(right[tokens[0, at]].item(), abs=2e-4)
            surely, perhaps = (int((right > right[tokens[0, at]] + margin).sum()) for margin in (2e-4, -2e-4))
            assert surely <= entry.rank <= perhaps and len(entry.top) == sampling.prompt_logprobs
            assert [value for _, value in entry.top] == pytest.approx(right.topk(len(entry.top)).values.tolist(), abs=2e-4)
    pooled = {"": [], "last": states[-1], "mean": states.mean(0), "cls": states[0], "max": states.amax(0)}[POOLINGS[sampling.pooling]]
    assert hidden == pytest.approx([float(value) for value in pooled], abs=2e-3)


@pytest.mark.parametrize(
    "changes",
    [
        {"max_num_batched_tokens": 9},
        {"max_num_batched_tokens": 9, "max_num_seqs": 1},
        {"pipeline_depth": 3, "page_count": 24},
        {"prefix_caching": False, "long_prefill_token_threshold": 1},
    ],
    ids=["chunks", "alone", "preempted", "token by token"],
)
def test_the_same_bits_however_a_prompt_is_computed(
    runner: ModelRunner, whole: dict[int, Found], changes: dict, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert results(host_rank(runner), monkeypatch, arrivals(), runner, **changes) == whole


def test_a_device_gives_the_same(whole: dict[int, Found], monkeypatch: pytest.MonkeyPatch) -> None:
    variants = DeviceVariants(operations=operations("cpu"), choose=sampler_for("cpu"), shapes=Shapes((), ()))
    rank = device_rank(runner_of(), TwinDevice(), variants)
    assert results(rank, monkeypatch, arrivals(), runner_of(), page_count=24) == whole


def test_no_graph_serves_a_step_that_needs_more_hidden_states(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = plain_operations()
    monkeypatch.setattr("vnext.models.loading.tensor_place.operations", lambda device_type: chosen)
    monkeypatch.setattr("vnext.runtime.rank.runner.serves", lambda *_: False)
    monkeypatch.setattr("vnext.models.layers.layers.operations", lambda device_type: chosen)
    variants = DeviceVariants(operations=chosen, choose=sampler_for("cpu"), shapes=Shapes((), (4, 10, 24)))
    rank = device_rank(runner_of(), TwinDevice(), variants)
    assert len(results(rank, monkeypatch, arrivals(7), runner_of())) == 6
    assert min(rank.steps.made.variants_run[form] for form in ("eager", "pieces")) > 0


def forgetful(self, each, hidden):
    """A mean of the last chunk alone."""
    return summed(self, replace(each, first=0, count=each.first + each.count), hidden)


def shifted(request, start, count):
    return [replace(each, first=each.first - (each.first > 0 and each.pooling == 0)) for each in ranges(request, start, count)]


summed, ranges = prompt_results.PromptSums._pooled, prompts.ranges_of


@pytest.mark.parametrize(
    ("target", "fault"),
    [
        ("vnext.runtime.batch.prompt_results.PromptSums._pooled", forgetful),
        ("vnext.runtime.batch.prompts.ranges_of", shifted),
    ],
    ids=["forgets chunks", "shifted by one in later chunks"],
)
def test_planted_faults_are_seen(
    runner: ModelRunner, whole: dict[int, Found], target: str, fault: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(target, fault)
    assert results(host_rank(runner), monkeypatch, arrivals(), runner, max_num_batched_tokens=9) != whole


def test_steps_without_such_rows_compute_nothing_for_them(runner: ModelRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    """The decodes of a scored request run whole, as those of others do."""
    computed: list[int] = []
    for user, compute in (("rank.host_cache", prompt_results.compute), ("rank.by_parts", prompt_tensors.compute)):
        counting = partial(lambda compute, each, *rest: computed.append(len(each.at)) or compute(each, *rest), compute)
        monkeypatch.setattr(f"vnext.runtime.{user}.compute", counting)
    given = arrivals()
    results(host_rank(runner), monkeypatch, given, runner)
    wanted = sum(part.count for each in given for part in ranges(as_request(each), 0, len(each.prompt) // 4))
    assert sum(computed) == wanted, "each position once: no preemption here"


def as_request(arrival: RequestArrived) -> Request:
    return Request(
        id=arrival.id, name=arrival.name, prompt=arrival.prompt, sampling=arrival.sampling, priority=0, arrival_ns=0, root=b""
    )
