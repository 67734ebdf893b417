"""Constrained requests on a device's twin: masks are made while the forward runs, and every token is the plain rank's."""

from __future__ import annotations

from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from device_twin import TwinDevice
from llguidance import LLMatcher
from msgspec.structs import replace
from rank_drive import bound_arrivals, device_rank, drive, host_rank, runner_of, some_arrivals, started_with

from vnext.kernels.batch_index import plain_batch_operations
from vnext.kernels.table import operations
from vnext.runtime.batch import masks
from vnext.runtime.batch.batch import PersistentBatch
from vnext.runtime.batch.masks import RowMasks
from vnext.runtime.batch.words import NO_WORD
from vnext.runtime.gpu.buckets import Shapes
from vnext.runtime.gpu.device_batch import DeviceBatch
from vnext.runtime.gpu.steps import DeviceVariants, Masking
from vnext.runtime.rank.gpu_loading import LaterSteps
from vnext.runtime.rank.runner import ModelRunner
from vnext.runtime.rank.steps import Computed, HostSteps
from vnext.sampling.sampling import sampler_for
from vnext.sched.schedule import schedule
from vnext.state.events import RequestArrived
from vnext.state.params import Constraint, Sampling
from vnext.state.reduce import reduce, start

GRAMMARS = (
    LLMatcher.grammar_from_json_schema({"type": "object", "properties": {"on": {"type": "boolean"}}, "required": ["on"]}),
    LLMatcher.grammar_from_regex("(yes|no|perhaps)( indeed){0,3}"),
)
SCHEDULES: tuple[dict[str, Any], ...] = ({}, {"pipeline_depth": 1}, {"pipeline_depth": 3, "page_count": 34})


@pytest.fixture(scope="module")
def runner() -> ModelRunner:
    return runner_of()


def with_grammars(count: int, seed: int) -> list[RequestArrived]:
    """Half of the requests keep to a grammar, of others some to lists."""
    arrivals = bound_arrivals(count, seed)
    for at in range(0, count, 2):
        constraint = Constraint(grammar=GRAMMARS[at // 2 % 2])
        own = Sampling(seed=at, max_tokens=30, temperature=1.2 if at % 4 else 0.0, constraint=constraint, logprobs=at % 5 - 1)
        arrivals[at] = replace(arrivals[at], sampling=own)
    return arrivals


def on_device(runner: ModelRunner, arrivals: list[RequestArrived], **changes: Any) -> dict:
    variants = DeviceVariants(operations=operations("cpu"), choose=sampler_for("cpu"), shapes=Shapes((), ()))
    return drive(device_rank(runner, TwinDevice(), variants), started_with(runner, eos_token_ids=(0, 4), **changes), arrivals)


@pytest.mark.parametrize("changes", SCHEDULES, ids=["two steps ahead", "in step", "three steps ahead, preempted"])
def test_masked_steps_give_the_tokens_of_the_plain_rank(runner: ModelRunner, changes: dict[str, Any]) -> None:
    arrivals = with_grammars(14, 3)
    expected = drive(host_rank(runner), started_with(runner, eos_token_ids=(0, 4), **changes), arrivals)
    assert on_device(runner_of(), arrivals, **changes) == expected
    free = [replace(each, sampling=replace(each.sampling, constraint=None)) for each in arrivals]
    assert on_device(runner_of(), free, **changes) != expected


def take_from_anyone(self: RowMasks, rows: list[Any], tokens: Any) -> None:
    """A bug: a row's token goes to whoever has the row by now."""
    own = [row._replace(matcher=self.matchers[row.place]) for row in rows if row.place in self.matchers]
    self._work.append(self._thread.submit(self._advance, [(row.place, row.matcher, (int(tokens[row.at]),)) for row in own]))


def forget_to_expect(self: Masking, rows: list[Any], samples: Any) -> None:
    """A bug: masks do not follow the tokens."""


@pytest.mark.parametrize(
    ("place", "name", "bug"),
    [(RowMasks, "take", take_from_anyone), (Masking, "expect", forget_to_expect)],
    ids=["a row of another request", "a token forgotten"],
)
def test_planted_bugs_of_masked_steps_are_seen(
    runner: ModelRunner, monkeypatch: pytest.MonkeyPatch, place: type, name: str, bug: Any
) -> None:
    arrivals, changes = with_grammars(14, 3), {"pipeline_depth": 3, "page_count": 34}
    expected = drive(host_rank(runner), started_with(runner, eos_token_ids=(0, 4), **changes), arrivals)
    monkeypatch.setattr(place, name, bug)
    assert on_device(runner_of(), arrivals, **changes) != expected


def test_a_device_reports_failed_grammars_and_the_words_of_its_masks_as_the_host_does(
    runner: ModelRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    arrivals = with_grammars(3, 5)  # which all come in the first turn, so that the steps are the same
    arrivals[2] = replace(arrivals[2], sampling=replace(arrivals[2].sampling, constraint=Constraint(grammar="{")))
    found: dict[type, list[Computed]] = {HostSteps: [], LaterSteps: []}
    for steps, seen in found.items():
        wait = steps.wait
        monkeypatch.setattr(steps, "wait", lambda self, wait=wait, seen=seen: seen.append(wait(self)) or seen[-1])
    drive(host_rank(runner), started_with(runner, eos_token_ids=(0, 4), pipeline_depth=1), arrivals)
    on_device(runner_of(), arrivals, pipeline_depth=1)
    failed = [{pair for each in seen for pair in each.failed} for seen in found.values()]
    assert failed[0] == failed[1] and {id_ for id_, _ in failed[0]} == {2}
    host, device = ({each.fed[:-1]: each.fed[-1] for each in seen if each.fed} for seen in found.values())
    alike = host.keys() & device.keys()
    assert {step: host[step] for step in alike} == {step: device[step] for step in alike}
    assert sum(host[step] != NO_WORD for step in alike) > 8


def test_a_row_whose_masks_lack_memory_joins_anew(runner: ModelRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a device as on the host, behind the steps that are dropped."""
    begun, vocabulary = started_with(runner, eos_token_ids=(0, 4)), runner.vocabulary((0, 4))
    device = DeviceBatch(begun.config, runner.config.vocab_size, TwinDevice(), plain_batch_operations(), vocabulary)
    host = PersistentBatch(begun.config, runner.config.vocab_size, vocabulary)
    arrived = reduce(start(begun), with_grammars(1, 3)[0])
    state = reduce(arrived, schedule(arrived))
    for batch, of_rows, update in (device, device.masks, device.host_step), (host, host._sampling.masks, host.step_inputs):
        update(state)
        (row,) = before = of_rows.of(np.arange(1))
        with monkeypatch.context() as short:
            short.setattr(masks, "require_room", Mock(side_effect=MemoryError))
            of_rows.take(before, np.array([5]))
            batch.drop_steps()
        update(state)
        assert of_rows.of(np.arange(1))[0].matcher is not row.matcher


def test_requests_without_constraints_make_no_masks(runner: ModelRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Masking, "apply", None)
    assert len(on_device(runner_of(), some_arrivals(5, 1))) == 5
