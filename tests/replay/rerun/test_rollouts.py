"""rollouts: a log as a trainer's file, and a digest that neither order, batches nor kills change."""

from __future__ import annotations

import json
import random
from pathlib import Path

import msgspec
import numpy as np
import pytest
from engine_here import engines_here
from model_logs import record

from vnext import LLM, SamplingParams
from vnext.log import codec
from vnext.log.codec import Frame
from vnext.replay.answers.rollouts import Rollout, digest_of
from vnext.replay.reading.folding import Folded, fold
from vnext.replay.reading.source import open_log
from vnext.replay.reading.writer import Writer, snapshot_of_log
from vnext.sched.schedule import schedule
from vnext.state.events import RequestArrived, RequestResumed, StepCommitted, pack_tokens, unpack_tokens
from vnext.state.outputs import outputs
from vnext.state.preempt import row_tokens
from vnext.state.reduce import reduce, start
from vnext.state.state import Request


def lines_of(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture(scope="module")
def full_log(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return record(checkpoint, tmp_path_factory.mktemp("logs") / "full", requests=24)


def test_a_line_has_what_a_trainer_needs(full_log, answer, tmp_path):
    code, found = answer("rollouts", full_log, "-o", tmp_path / "out.jsonl", "--logprobs")
    lines = lines_of(tmp_path / "out.jsonl")
    assert code == 0 and found["rollouts"] == len(lines) == 24 - found["aborted"] and found["unfinished"] == 0
    arrivals = {
        event.name: event
        for item in open_log(full_log).items()
        for event in getattr(item, "events", ())
        if isinstance(event, RequestArrived)
    }
    started = open_log(full_log).header.started
    for line in lines:
        asked = arrivals[line["name"]]
        assert line["prompt_token_ids"] == unpack_tokens(asked.prompt).tolist() and line["seed"] == asked.sampling.seed
        assert line["sampling"]["max_tokens"] == asked.sampling.max_tokens == len(line["token_ids"]) == len(line["logprobs"])
        assert line["finish_reason"] == "length" and line["weights"] == started.model_digest
        assert all(np.float32(each) == each <= 0 for each in line["logprobs"])
    assert found["tokens"] == sum(len(line["token_ids"]) for line in lines)
    assert found["weights"] == [started.model_digest]


def test_the_digest_is_that_of_other_batches(full_log, checkpoint, answer, tmp_path):
    """Another order of steps, other blocks and no preemption: the aborted requests apart, the same rollouts."""
    digests, names = [], []
    for place, changes in enumerate(({}, {"page_count": 400, "max_num_seqs": 2}, {"max_num_batched_tokens": 9, "block_size": 8})):
        log = record(checkpoint, tmp_path / f"log{place}", requests=8, **changes)
        code, found = answer("rollouts", log, "-o", tmp_path / f"{place}.jsonl")
        assert (code, found["aborted"], found["rollouts"]) == (0, 0, 8), "this story aborts nothing"
        digests.append(found["digest"])
        names.append([line["name"] for line in lines_of(tmp_path / f"{place}.jsonl")])
    assert len(set(digests)) == 1 and len(digests[0]) == 64
    assert len(set(map(tuple, names))) > 1, "the answers ended in another order"
    assert answer("rollouts", full_log, "-o", tmp_path / "other.jsonl")[1]["digest"] != digests[0]


def test_the_digest_sees_every_field(full_log, answer, tmp_path):
    answer("rollouts", full_log, "-o", tmp_path / "out.jsonl")
    rollouts = [msgspec.convert(line, Rollout) for line in lines_of(tmp_path / "out.jsonl")]
    whole = digest_of(rollouts)
    shuffled = random.Random(3).sample(rollouts, len(rollouts))
    assert digest_of(shuffled) == whole != digest_of(rollouts[1:])
    first, *others = rollouts
    for change in (
        {"prompt_token_ids": [*first.prompt_token_ids, 1]}, {"token_ids": first.token_ids[:-1]}, {"finish_reason": "stop"},
        {"seed": first.seed + 1}, {"sampling": first.sampling | {"temperature": 0.25}}, {"weights": "0" * 32},
    ):  # fmt: skip
        assert digest_of([msgspec.structs.replace(first, **change), *others]) != whole
    for change in ({"name": "other"}, {"logprobs": [0.0]}):
        assert digest_of([msgspec.structs.replace(first, **change), *others]) == whole


def test_what_cannot_be_done_is_one_sentence(full_log, checkpoint, sentence, tmp_path):
    (tmp_path / "there").write_text("")
    assert "is there already: name a new file" in sentence("rollouts", full_log, "-o", tmp_path / "there")
    shape = record(checkpoint, tmp_path / "shape", requests=2, privacy="shape")
    assert "record with --log full" in sentence("rollouts", shape, "-o", tmp_path / "out")


def killed(log: Path, out: Path, frames: int) -> tuple[Path, Path]:
    """The log as a kill behind so many frames leaves it, and that of an engine that goes on with its requests: a few at a time, so
    in other batches. It answers as the first one would have."""
    source, tokens = open_log(log), final_tokens(log)
    items = [item for item in source.items() if isinstance(item, Frame)]
    first, second = out / "first", out / "second"
    first.mkdir(parents=True)
    data = codec.open_segment(source.header)[0]
    for item in items[:frames]:
        data += codec.encode_frame(item.digest, codec.encode_body(item.first_event, item.events, (), 0, source.header.token_width))
    (first / source.paths[0].name).write_bytes(data)
    last = [item.after for item in fold(open_log(first)) if isinstance(item, Folded)][-1]
    known = {int(id_): row_tokens(last, row) for row, id_ in enumerate(last.rows.id)}
    known |= {waiting.id: unpack_tokens(waiting.tokens) for waiting in last.waiting}
    resumed = [(arrival(last.requests[id_], found), id_) for id_, found in sorted(known.items())]
    later = [(event, event.id) for item in items[frames:] for event in item.events if isinstance(event, RequestArrived)]
    state = start(source.header.started)
    writer = Writer(second, source.header, lambda each: snapshot_of_log(each, "full"))
    numbers, waiting = {}, [*resumed, *later]
    while waiting or state.requests:
        events = []
        for event, number in waiting[:2]:
            events.append(msgspec.structs.replace(event, id=state.next_id + len(events)))
            numbers[events[-1].id] = number
        del waiting[:2]
        before = state
        for event in events:
            state = reduce(state, event)
        if (planned := schedule(state)) is not None:
            state = reduce(state, planned)
            scheduled = state.in_flight[0]
            ends, ids = (scheduled.starts + scheduled.counts)[scheduled.samples], scheduled.ids[scheduled.samples]
            sampled = [int(tokens[numbers[id_]][end]) for id_, end in zip(ids.tolist(), ends.tolist())]
            events += [planned, StepCommitted(step=planned.step, tokens=pack_tokens(sampled))]
            state = reduce(state, events[-1])
        writer.ready(before)
        writer.write(codec.encode_body(before.sequence, tuple(events), (), 0, source.header.token_width), state)
    writer.close()
    return first, second


def arrival(request: Request, tokens: np.ndarray) -> RequestResumed:
    return RequestResumed(
        id=0, name=request.name, prompt=request.prompt, sampling=request.sampling, priority=0, arrival_ns=0,
        generated=pack_tokens(tokens[request.prompt_length :]),
    )  # fmt: skip


def final_tokens(log: Path) -> dict[int, np.ndarray]:
    """All tokens of each request, in the end."""
    found: dict[int, list[int]] = {}
    for item in fold(open_log(log)):
        if isinstance(item, Folded):
            if isinstance(item.event, RequestArrived):
                found[item.event.id] = unpack_tokens(item.event.prompt).tolist()
            for output in outputs(item.before, item.event, item.after):
                found[output.id] += [output.token] * (output.token >= 0)
    return {id_: np.array(tokens) for id_, tokens in found.items()}


@pytest.mark.parametrize("share", [0.1, 0.3, 0.5, 0.7, 0.85])
def test_the_digest_is_that_of_a_killed_engine_and_its_successor(share, checkpoint, answer, tmp_path):
    log = record(checkpoint, tmp_path / "log", requests=8)
    whole = answer("rollouts", log, "-o", tmp_path / "whole.jsonl")[1]
    assert (whole["aborted"], whole["rollouts"]) == (0, 8), "this story aborts nothing"
    frames = int(share * sum(isinstance(item, Frame) for item in open_log(log).items()))
    first, second = killed(log, tmp_path / "killed", frames)
    alone = answer("rollouts", first, "-o", tmp_path / "first.jsonl")[1]
    assert alone["digest"] != whole["digest"] and alone["rollouts"] + alone["unfinished"] <= 8
    code, found = answer("rollouts", first, second, "-o", tmp_path / "both.jsonl")
    assert (code, found["rollouts"], found["unfinished"], found["digest"]) == (0, 8, 0, whole["digest"])
    assert sorted(map(str, lines_of(tmp_path / "both.jsonl"))) == sorted(map(str, lines_of(tmp_path / "whole.jsonl")))


def test_log_probabilities_are_those_that_the_engine_reported(answer, tmp_path):
    """The log has none: the model computes them anew, in the same bits."""
    how = [SamplingParams(seed=seed, temperature=0.9, max_tokens=20, ignore_eos=True, logprobs=0) for seed in range(9)]
    asked = [[3 + 5 * place % 300 for place in range(1 + 23 * index % 200)] for index in range(9)]
    with engines_here(), LLM(executor="inproc", threads=1, log="full", log_dir=tmp_path / "logs", max_num_batched_tokens=50) as llm:
        answers = llm.generate(asked, how, use_tqdm=False)
        log = llm.log_dir
    code, found = answer("rollouts", log, "-o", tmp_path / "out.jsonl", "--logprobs")
    lines = {line["name"]: line for line in lines_of(tmp_path / "out.jsonl")}
    assert (code, found["rollouts"]) == (0, 9)
    for index, each in enumerate(answers):
        output = each.outputs[0]
        reported = [entry[token].logprob for token, entry in zip(output.token_ids, output.logprobs, strict=True)]
        line = next(line for line in lines.values() if line["seed"] == index)
        assert (line["token_ids"], line["logprobs"]) == (output.token_ids, reported)
