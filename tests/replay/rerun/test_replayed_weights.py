"""exec, audit, bisect and rollouts behind changes of the weights: each step runs with the version that computed it, or is named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

import msgspec
import pytest
import torch
from model_logs import record
from safetensors.torch import load_file, save_file
from test_audit import Answers, forged, other_token, tokens_changed

from vnext.replay.execution.recorded import Selection, Walk
from vnext.replay.reading.drawn import Span
from vnext.replay.reading.folding import Folded, fold
from vnext.replay.reading.source import open_log
from vnext.state.events import StepCommitted, WeightsChanged


class Changed(NamedTuple):
    """A log whose weights changed twice, first between requests, then while requests live, and the files of both versions."""

    log: Path
    files: dict[int, Path]


@pytest.fixture(scope="module")
def changed(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Changed:
    folder, generator = tmp_path_factory.mktemp("weights"), torch.Generator().manual_seed(5)
    old, files = load_file(checkpoint / "model.safetensors"), {}
    for version in (1, 2):
        files[version] = folder / f"{version}.safetensors"
        new = {name: each + 0.05 * torch.randn(each.shape, generator=generator) for name, each in old.items()}
        save_file(new, files[version])
    updates = {6: (files[1], "wait"), 18: (files[2], "keep")}
    log = record(checkpoint, folder / "log", requests=30, tokens=20, updates=updates, settings={"digests_weights": True})
    return Changed(log, files)


@pytest.fixture
def moved(changed: Changed, tmp_path: Path) -> Changed:
    """The files are no longer where the log says."""
    files = {version: path.rename(tmp_path / path.name) for version, path in changed.files.items()}
    yield Changed(changed.log, files)
    for version, path in files.items():
        path.rename(changed.files[version])


def changes_of(log: Path) -> dict[int, WeightsChanged]:
    events = (item.event for item in fold(open_log(log)) if isinstance(item, Folded))
    return {event.version: event for event in events if isinstance(event, WeightsChanged)}


def steps_by_version(log: Path) -> dict[int, int]:
    found = {0: 0, 1: 0, 2: 0}
    for item in fold(open_log(log)):
        if isinstance(item, Folded) and isinstance(item.event, StepCommitted):
            found[item.before.weights.version if item.before.weights else 0] += 1
    return found


@pytest.mark.parametrize("extra", [(), ("--solo",), ("--tp", "2"), ("--steps", "20:"), ("--kernels", "portable"), ("--kernels", "torch")], ids=" ".join)
def test_every_token_comes_out_again(changed, answer, extra):
    steps = steps_by_version(changed.log)
    assert min(steps.values()) > 3
    code, found = answer("exec", changed.log, *extra)
    assert (code, found["same"], found["differ"], found["skipped"], found["end"]) == (0, True, 0, 0, "complete")
    assert found["steps"] == sum(steps.values()) - (20 if "--steps" in extra else 0)


def test_without_the_files_the_rest_runs(moved, answer, sentence):
    steps, changes = steps_by_version(moved.log), changes_of(moved.log)
    for extra in ((), ("--solo",)):
        code, found = answer("exec", moved.log, *extra)
        assert (code, found["steps"], found["skipped"]) == (0, steps[0], steps[1] + steps[2])
    named = [f"version {version} of the weights ({changes[version].digest}) is not here" for version in (1, 2)]
    assert [each.startswith(start) for each, start in zip(found["lacking"], named, strict=True)] == [True, True]
    assert "give the folder or file that has them with --weights 1=PATH" in found["lacking"][0]
    assert "nothing was compared: version 2 of the weights" in sentence("exec", moved.log, "--steps", f"{steps[0] + steps[1]}:")


def test_the_files_are_named(moved, answer):
    named = [word for version, path in moved.files.items() for word in ("--weights", f"{version}={path}")]
    steps = steps_by_version(moved.log)
    code, found = answer("exec", moved.log, *named)
    assert (code, found["steps"], found["skipped"], found["lacking"]) == (0, sum(steps.values()), 0, [])
    code, found = answer("exec", moved.log, *named[2:])
    assert (code, found["steps"], found["skipped"]) == (0, steps[0] + steps[2], steps[1])
    code, found = answer("audit", moved.log, "--sample", "all", *named)
    assert (code, found["same"], found["steps"], found["not_audited"]) == (0, True, sum(steps.values()), 0)


def test_other_files_are_not_used(moved, answer, sentence, tmp_path):
    digest = changes_of(moved.log)[1].digest
    said = sentence("exec", moved.log, "--weights", f"1={moved.files[2]}")
    assert "2.safetensors has the digest" in said and f"the log needs version 1 of the weights ({digest})" in said
    torn = tmp_path / "torn.safetensors"
    torn.write_bytes(moved.files[1].read_bytes()[:-9])
    assert "cannot be used" in sentence("exec", moved.log, "--weights", f"1={torn}")
    for wrong in ("1", "x=y", "0=y", "1="):
        assert "give a version, counted from 1, and its folder or file" in sentence("exec", moved.log, "--weights", wrong)
    code, found = answer("exec", moved.log, "--weights", f"1={moved.files[2]}", "--any-model")
    assert code == 1 and found["differ"] > 10, "as --any-model says, and other tokens come out"


def test_an_audit_names_wrong_weights_and_counts_missing_ones(moved, answer, sentence):
    steps, changes = steps_by_version(moved.log), changes_of(moved.log)
    code, found = answer("audit", moved.log, "--sample", "all", "--weights", f"1={moved.files[1]}")
    assert (code, found["steps"], found["not_audited"], found["findings"]) == (0, steps[0] + steps[1], steps[2], [])
    assert found["missed"] == pytest.approx(steps[2] / sum(steps.values())) and "--weights 2=PATH" in found["lacking"][0]
    code, found = answer("audit", moved.log, "--sample", "all", "--weights", f"1={moved.files[2]}")
    (finding,) = found["findings"]
    assert (code, finding["field"], finding["recorded"], finding["found"]) == (1, "weights", changes[1].digest, changes[2].digest)
    assert found["not_audited"] == steps[1] + steps[2] and len(found["lacking"]) == 1


def test_bisect_follows(changed, answer):
    code, found = answer("bisect", changed.log)
    assert (code, found["same"], found["steps"], found["lacking"]) == (0, True, sum(steps_by_version(changed.log).values()), [])


def test_rollouts_say_which_weights_drew_them(changed, answer, tmp_path):
    code, found = answer("rollouts", changed.log, "-o", tmp_path / "out.jsonl", "--logprobs")
    changes, model = changes_of(changed.log), open_log(changed.log).header.started.model_digest
    lines = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    digests = {0: model, 1: changes[1].digest, 2: changes[2].digest}
    assert code == 0 and {line.get("version", 0) for line in lines} == {0, 1, 2}
    assert all(line["weights"] == digests[line.get("version", 0)] for line in lines)
    across = [line for line in lines if "before" in line]
    assert across and all(digest == digests[1] and 0 < count < len(line["token_ids"]) for line in across for count, digest in line["before"])
    assert found["weights"] == sorted(set(digests.values())) and found["not_scored"] == 0
    assert all(len(line["logprobs"]) == len(line["token_ids"]) for line in lines)


def test_rollouts_without_the_files_lack_log_probabilities(moved, answer, tmp_path):
    code, found = answer("rollouts", moved.log, "-o", tmp_path / "out.jsonl", "--logprobs", "--weights", f"1={moved.files[1]}")
    lines = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert code == 0 and found["not_scored"] == sum(line.get("version") == 2 for line in lines) > 0
    assert all(("logprobs" in line) == (line.get("version") != 2) for line in lines) and "--weights 2=PATH" in found["lacking"][0]


def test_falsifications_behind_a_change_are_caught(changed, answer, tmp_path):
    """By a careful forger, who recomputes every digest of the states."""
    named = [word for version, path in changed.files.items() for word in ("--weights", f"{version}={path}")]
    answers = Answers(changed.log)
    drawn = {span.weights.version: id_ for id_, span in drawn_by(changed.log).items() if span.weights and id_ in answers.ended}
    for version in (1, 2):
        place = answers.places[drawn[version]][-1]
        fake = forged(changed.log, tmp_path / f"token {version}", tokens_changed({place: other_token}))
        code, found = answer("audit", fake, "--sample", "all", *named)
        assert (code, found["findings"][0]["field"], found["findings"][0]["request"]) == (1, "token", drawn[version])
        fake = forged(changed.log, tmp_path / f"digest {version}", digest_changed(version))
        code, found = answer("audit", fake, "--sample", "all", *named)
        assert (code, found["findings"][0]["field"], found["findings"][0]["recorded"]) == (1, "weights", "0" * 32)


def digest_changed(version: int):
    def change(event):
        return msgspec.structs.replace(event, digest="0" * 32) if isinstance(event, WeightsChanged) and event.version == version else event

    return change


def drawn_by(log: Path) -> dict[int, Span]:
    """What drew each answer's last token."""
    walk = Walk(log, Selection(), telling=True)
    walk.begin(10**6, str)
    list(walk.steps())
    return {id_: spans[-1] for id_, each in walk.reported.items() if (spans := list(each.spans(each.request.prompt_length)))}
