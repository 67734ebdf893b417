"""bisect: a planted fault of one operation in one layer is named, with its step and its rows; a healthy model has none."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from model_logs import record

from vnext.kernels.table import Operations, chosen_operations, substituted
from vnext.replay.execution.recorded import Selection, Walk
from vnext.replay.rerun.search import Pair, gap
from vnext.state.state import StepInFlight


@pytest.fixture(scope="module")
def full_log(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return record(checkpoint, tmp_path_factory.mktemp("logs") / "full", requests=10)


def faulty(operation: str, number: int, change: Callable[..., Any]) -> Operations:
    """The table, but that of the calls of `operation` in a step, told apart by the order in which their first tensors of
    weights or caches came first, the `number`th is changed: `change(result, *arguments)`."""
    served = chosen_operations("cpu")
    plain, known = getattr(served, operation), []
    about = {"embedding_rows": 0}.get(operation, 1)

    def function(*arguments: Any) -> Any:
        first = arguments[about]
        key = id(getattr(first, "key_cache", first))
        if key not in known:
            known.append(key)
        result = plain(*arguments)
        return change(result, *arguments) if known.index(key) == number else result

    return served._replace(**{operation: function})


def a_bit_larger(result: Any, *arguments: Any) -> Any:
    first, *rest = result if isinstance(result, tuple) else (result,)
    first = first.clone()
    first[-1, 0] += 0.01 * first[-1].abs().max() + 1e-3
    return (first, *rest) if rest else first


def other_keys(result: Any, *arguments: Any) -> Any:
    cache, slot = arguments[1].key_cache, int(arguments[1].slots[-1])
    cache[slot // cache.shape[2], 0, slot % cache.shape[2]] *= 1.01
    return result


FAULTS = [
    ("linear", 4, a_bit_larger, (1, "linear", "layers.1.attention.output.weight", "output")),
    ("linear", 0, a_bit_larger, (0, "linear", "layers.0.attention.qkv.weight", "output")),
    ("gated_linear", 1, a_bit_larger, (1, "gated_linear", "layers.1.mlp.gate_up.weight", "output")),
    ("paged_attention", 1, a_bit_larger, (1, "paged_attention", "", "output")),
    ("rotary_kv_write", 1, other_keys, (1, "rotary_kv_write", "", "keys")),
    ("rms_norm", 0, a_bit_larger, (0, "rms_norm", "layers.0.attention_norm", "output")),
    ("logits", 0, a_bit_larger, (-1, "logits", "head", "output")),
    ("embedding_rows", 0, a_bit_larger, (-1, "embedding_rows", "embedding", "output")),
]


@pytest.mark.parametrize(("operation", "number", "change", "named"), FAULTS, ids=[f"{name} {at}" for name, at, *_ in FAULTS])
def test_a_fault_of_one_operation_in_one_layer_is_named(full_log, answer, operation, number, change, named):
    with substituted(faulty(operation, number, change)):
        code, found = answer("bisect", full_log, "--kernels", "torch", "--steps", "3:")
    first = found["found"]
    assert (code, first["step"]) == (1, 3)
    assert (first["layer"], first["operation"], first["weight"], first["part"]) == named
    assert first["rows_differ"] == 1 and first["rows"][0]["row"] == first["shape"][0] - 1
    assert 1e-3 < first["max_rel"] < 0.2 and first["max_abs"] > 0


def in_flight(log: Path) -> list[StepInFlight]:
    return [step.state.in_flight[-1] for step in Walk(log, Selection()).steps()]


def test_a_fault_that_depends_on_the_batch_shows_alone_by_every_bit(full_log, answer):
    """One unit in the last place of one element, in batches of so many tokens as no request ever has."""
    steps = in_flight(full_log)
    own = {count for scheduled in steps for count in scheduled.counts.tolist()}
    bad = next(scheduled for scheduled in steps if len(scheduled.ids) > 2 and scheduled.tokens not in own)

    def nudged(result: torch.Tensor, x: torch.Tensor, *rest: Any) -> torch.Tensor:
        if x.shape[0] != bad.tokens:
            return result
        result = result.clone()
        result[1, 2] = torch.nextafter(result[1, 2], torch.tensor(torch.inf))
        return result

    with substituted(faulty("linear", 5, nudged)):
        code, found = answer("bisect", full_log, "--solo")
    first = found["found"]
    assert (code, first["layer"], first["operation"], first["weight"]) == (1, 1, "linear", "layers.1.mlp.down.weight")
    assert (first["step"], first["elements_differ"], [row["row"] for row in first["rows"]]) == (bad.step, 1, [1])
    assert found["tolerance"] == 0.0 and first["shape"][0] == bad.tokens and found["steps"] == bad.step + 1
    assert answer("bisect", full_log)[0] == 0


def first_sampling(log: Path) -> int:
    return next(scheduled.step for scheduled in in_flight(log) if scheduled.samples.any())


def test_layers_as_one_call_are_held_to_the_layers_one_by_one(full_log, answer, monkeypatch):
    from vnext.models.layers import fused

    run = fused.run
    monkeypatch.setattr(fused, "run", lambda *arguments: run(*arguments) * 1.001)
    code, found = answer("bisect", full_log)
    assert (code, found["found"]["operation"], found["found"]["step"]) == (1, "stack", first_sampling(full_log))


def test_a_fault_in_one_form_of_sharing_is_named(full_log, answer):
    """Only ranks multiply by half of the inputs of `down`, which are 52."""

    def wrong(result: torch.Tensor, x: torch.Tensor, *rest: Any) -> torch.Tensor:
        return result * 1.01 if x.shape[1] == 26 else result

    served = chosen_operations("cpu")
    with substituted(served._replace(linear=lambda *arguments: wrong(served.linear(*arguments), *arguments))):
        code, found = answer("bisect", full_log, "--tp", "2")
        first = found["found"]
        assert (code, first["layer"], first["weight"]) == (1, 0, "layers.0.mlp.down.weight")
        assert answer("exec", full_log, "--tp", "2")[1]["tokens"] > 0
    assert answer("bisect", full_log, "--tp", "2")[0] == 0


def test_what_was_recorded_otherwise_and_is_not_made_here_is_said(checkpoint, tmp_path, answer, monkeypatch):
    """An engine with a broken kernel wrote the log; here it is whole."""
    from vnext.models.layers import decoder

    served = chosen_operations("cpu")
    with monkeypatch.context() as patched, substituted(served._replace(logits=lambda *given: -served.logits(*given))):
        patched.setattr(decoder.fused, "describe", lambda *given: None)
        log = record(checkpoint, tmp_path / "log", requests=3)
    code, found = answer("exec", log)
    assert code == 1 and found["first"]["step"] == first_sampling(log)
    code, found = answer("bisect", log)
    assert code == 1 and found["found"] is None and found["token"]["step"] == first_sampling(log)


@pytest.mark.parametrize(
    ("ours", "theirs", "tolerance", "rows"),
    [
        ([[1.0, 2.0]], [[1.0, 2.0]], 0.0, ()),
        ([[1.0, 2.0], [0.0, 5.0]], [[1.0, 2.0], [0.0, 5.1]], 0.01, (1,)),
        ([[1.0, 2.0], [0.0, 5.0]], [[1.0, 2.0], [0.0, 5.1]], 0.05, ()),
        ([[float("nan"), 2.0]], [[float("nan"), 2.0]], 0.0, ()),
        ([[float("nan"), 2.0]], [[1.0, 2.0]], 0.5, (0,)),
        ([[float("inf"), 2.0]], [[float("-inf"), 2.0]], 0.5, (0,)),
        ([[0.0, -0.0]], [[0.0, 0.0]], 0.0, ()),
        ([[1e-9]], [[0.0]], 0.5, (0,)),
    ],
)
def test_the_measure(ours, theirs, tolerance, rows):
    assert gap(Pair("output", torch.tensor(ours), torch.tensor(theirs)), tolerance).rows == rows
