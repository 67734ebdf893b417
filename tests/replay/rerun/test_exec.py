"""exec: a model that runs again gives every token again, and one token that is another is named at its very step."""

from __future__ import annotations

import random
from importlib.metadata import EntryPoint, EntryPoints
from pathlib import Path

import msgspec
import pytest
from checkpoints import save_checkpoint
from model_logs import record, rewritten, with_other_token
from test_hostile import with_nasty_parts

from vnext.replay.cli.main import main
from vnext.replay.execution.recorded import Selection, Walk
from vnext.replay.reading.info import info
from vnext.replay.reading.source import open_log
from vnext.sampling import outside
from vnext.state.config import Speculation
from vnext.state.state import State

replace = msgspec.structs.replace


class Seen:
    """What a story must have had for its tokens to prove anything."""

    def __init__(self) -> None:
        self.chunks = 0

    def __call__(self, state: State) -> None:
        for scheduled in state.in_flight:
            self.chunks += int((~scheduled.samples).sum())
        self.hits, self.preempted = state.counters.prefix_hit_tokens, state.counters.preempted


@pytest.fixture(scope="module")
def full_log(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    seen = Seen()
    log = record(checkpoint, tmp_path_factory.mktemp("logs") / "full", requests=24, after=seen)
    assert seen.chunks > 5 and seen.hits > 20 and seen.preempted > 3
    return log


@pytest.mark.parametrize("extra", [(), ("--solo",), ("--tp", "2"), ("--kernels", "torch", "--threads", "1")], ids=" ".join)
def test_every_token_comes_out_again(full_log, answer, extra):
    code, found = answer("exec", full_log, *extra)
    assert (code, found["same"], found["differ"], found["end"]) == (0, True, 0, "complete")
    assert found["requests"] == 24 and found["rebuilt_tokens"] == 0
    assert found["tokens"] == (info(open_log(full_log)).sampled_tokens if extra != ("--solo",) else found["tokens"]) > 150


def second(logits, rows):
    """A sampler of no package."""
    return logits.topk(2).indices[:, 1]


def test_a_sampler_from_outside_chooses_again(checkpoint, tmp_path, answer, monkeypatch, capsys):
    points = EntryPoints([EntryPoint("second", "test_exec:second", outside.GROUP)])
    monkeypatch.setattr("importlib.metadata.entry_points", lambda group: points)
    log = record(checkpoint, tmp_path / "own", requests=6, settings={"sampler": "second"})
    for extra in ((), ("--solo",)):
        code, found = answer("exec", log, *extra)
        assert (code, found["same"]) == (0, True) and found["tokens"] > 20
    monkeypatch.setattr("importlib.metadata.entry_points", lambda group: EntryPoints())
    assert main(["exec", str(log)]) == 2
    assert "chose tokens by a sampler from outside, and no installed package offers the sampler 'second'" in capsys.readouterr().err


def test_a_model_that_turns_otherwise_for_long_requests_does_so_again(tmp_path, answer):
    """Which of its ropes a log's engine had follows from the length of its requests; with the other one tokens differ."""
    rope = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [3.0, 9.0, 2.0, 5.0]}
    path = save_checkpoint(tmp_path, rope_scaling={**rope, "original_max_position_embeddings": 16})
    long = record(path, tmp_path / "long", requests=6, settings={"max_model_len": 96})
    assert answer("exec", long)[1]["same"] is True
    short = record(path, tmp_path / "short", requests=6)
    assert answer("exec", short)[1]["same"] is False


@pytest.mark.parametrize(
    ("settings", "config"),
    [
        ({"dtype": "bfloat16"}, {"pipeline_depth": 1, "prefix_caching": False}),
        ({"quantization": "int8"}, {"pipeline_depth": 3, "block_size": 8, "page_count": 26}),
        ({"quantization": "int8", "activations": "bf16"}, {}),
    ],
    ids=["bfloat16", "int8", "bf16 activations"],
)
def test_numbers_are_those_of_the_log(checkpoint, tmp_path, answer, settings, config):
    log = record(checkpoint, tmp_path / "log", seed=3, settings=settings, **config)
    for extra in ((), ("--solo",)):
        code, found = answer("exec", log, *extra)
        assert (code, found["differ"], found["elsewhere"]) == (0, 0, []) and found["tokens"] > 60
    assert found["numerics"] | {"dtype": "bfloat16", **settings} == found["numerics"]
    if "activations" in settings:
        code, found = answer("exec", log, "--activations", "int8")
        assert code == 1 and [(each["name"], each["there"], each["here"]) for each in found["elsewhere"]] == [("activations", "bf16", "int8")]
    code, found = answer("exec", log, "--dtype", "float32", "--quantization", "none")
    assert {ground["name"] for ground in found["elsewhere"]} >= {"dtype"} and found["numerics"]["dtype"] == "float32"


@pytest.mark.parametrize("name", ["gemma2", "gpt2", "mixtral_window"])
def test_every_family_comes_out_again_and_from_any_step(tmp_path, answer, name):
    """With windows: what was given back is not there to be rebuilt, and need not be."""
    from family_cases import save_case

    save_case(tmp_path / name, name)
    log = record(tmp_path / name, tmp_path / "log", seed=5, page_count=120, requests=8)
    for extra in ((), ("--solo",), ("--steps", "12:")):
        code, found = answer("exec", log, *extra)
        assert (code, found["differ"]) == (0, 0) and found["tokens"] > 20
    assert found["rebuilt_tokens"] > 0
    code, found = answer("bisect", log, "--tp", "2", "--steps", ":6")
    assert (code, found["found"]) == (0, None) and found["operations"][0]["calls"] >= 6
    code, found = answer("bisect", log, "--steps", "12:16")
    assert (code, found["found"], found["tolerance"]) == (0, None, 0.0)


def test_a_model_with_recurrent_layers_comes_out_again_and_from_any_step(tmp_path, answer, sentence):
    from hybrids import save_hybrid

    save_hybrid(tmp_path / "qwen3_5", "qwen3_5")
    log = record(tmp_path / "qwen3_5", tmp_path / "log", seed=5, requests=16, state_pages=20, snapshot_interval=16, segment_bytes=2000)
    for extra in ((), ("--solo",), ("--steps", "12:"), ("--tp", "2")):
        code, found = answer("exec", log, *extra)
        assert (code, found["differ"], found["rebuilt_tokens"] > 0) == (0, 0, extra == ("--steps", "12:")) and found["tokens"] > 20
    code, found = answer("audit", log, "--sample", "50%", "--seed", "7")
    assert (code, found["same"], found["findings"]) == (0, True, [])
    min(log.glob("*.vnextlog")).unlink()
    code, found = answer("exec", log)
    assert (code, found["differ"]) == (0, 0) and found["rebuilt_tokens"] > 0
    assert "those of recurrent layers change what they read" in sentence("bisect", log)


def test_drafts_of_a_model_with_recurrent_layers_come_out_again(tmp_path, answer):
    """What a step leaves in a state page is behind its drafts, also those that were not kept."""
    from hybrids import save_hybrid

    save_hybrid(tmp_path / "granite_h", "granite_h")
    drafted = Speculation(method="suffix", prompt_lookup_min=1, suffix_decoding_min_token_prob=0.01)
    sizes = dict(tokens=60, max_model_len=160, page_count=120, state_pages=20, snapshot_interval=16)
    log = record(tmp_path / "granite_h", tmp_path / "log", seed=5, speculation=drafted, **sizes)
    *_, last = Walk(log, Selection()).steps()
    assert last.state.counters.draft_tokens > last.state.counters.accepted_tokens > 0
    for extra in ((), ("--solo",), ("--steps", "12:")):
        code, found = answer("exec", log, *extra)
        assert (code, found["differ"]) == (0, 0) and found["tokens"] > 20


def test_an_altered_token_is_named_at_its_step(full_log, tmp_path, answer):
    step = next(step for step in Walk(full_log, Selection()).steps() if step.step >= 9 and len(step.tokens) > 2)
    other = (int(step.tokens[1]) + 1) % 61
    log = with_other_token(full_log, tmp_path / "altered", step.step, 1, other)
    code, found = answer("exec", log)
    first = found["first"]
    scheduled = step.state.in_flight[-1]
    id_ = int(scheduled.ids[scheduled.samples][1])
    end = int((scheduled.starts + scheduled.counts)[scheduled.samples][1])
    assert code == 1 and not found["same"]
    assert (first["step"], first["place"], first["request"], first["position"]) == (step.step, 1, id_, end)
    assert (first["recorded"], first["again"], first["event"]) == (other, int(step.tokens[1]), step.event)
    assert first["margin"] == pytest.approx(first["again_logprob"] - first["recorded_logprob"])
    code, alone = answer("exec", log, "--solo", "--requests", id_)
    named = ("step", "request", "position", "recorded", "again")
    assert code == 1 and [alone["first"][name] for name in named] == [first[name] for name in named]
    code, others = answer("exec", log, "--requests", ",".join(str(each) for each in range(24) if each != id_))
    assert (code, others["differ"], others["requests"]) == (0, 0, 23)
    assert answer("exec", log, "--steps", f":{step.step}")[0] == 0


def test_steps_from_the_middle_compute_what_they_read_first(full_log, answer):
    """In a whole log, and in one whose beginning was rotated away, with steps in flight across the edge."""
    code, found = answer("exec", full_log, "--steps", "20:35")
    assert (code, found["differ"], found["steps"]) == (0, 0, 15) and found["rebuilt_tokens"] > 50
    code, alone = answer("exec", full_log, "--steps", "20:35", "--solo")
    assert (code, alone["differ"], alone["steps"]) == (0, 0, 15) and 0 < alone["tokens"] <= found["tokens"]


def test_a_log_without_its_beginning_runs_from_its_snapshot(checkpoint, tmp_path, answer):
    log = record(checkpoint, tmp_path / "log", requests=30, segment_bytes=900)
    segments = sorted(log.glob("*.vnextlog"))
    whole = answer("exec", log)[1]
    segments[0].unlink()
    code, found = answer("exec", log)
    assert len(segments) > 1 and (code, found["differ"]) == (0, 0)
    assert 1 <= found["unseen"] <= 2, "the steps in flight where the log begins, at a depth of two"
    assert 0 < found["tokens"] < whole["tokens"] and found["rebuilt_tokens"] > 0
    assert answer("exec", log, "--solo")[:1] == (0,)


def test_a_log_of_two_ranks_runs_on_two_and_is_compared_with_them(full_log, tmp_path, answer):
    two = rewritten(full_log, tmp_path / "two", lambda header: replace(header, started=replace(header.started, world_size=2)))
    code, found = answer("exec", two)
    assert (code, found["differ"], found["numerics"]["ranks"]) == (0, 0, 2)
    code, found = answer("bisect", two, "--steps", ":8")
    assert (code, found["found"], found["numerics"]["ranks"], found["against"]["ranks"]) == (0, None, 1, 2)
    assert max(each["max_rel"] for each in found["operations"]) == 0 < found["tolerance"]


def record_of_nowhere(log: Path, target: Path) -> Path:
    """The log, as if its model had been somewhere else."""
    return rewritten(log, target, lambda header: replace(header, started=replace(header.started, model="some/where")))


def test_what_cannot_be_run_is_said_in_a_sentence(full_log, checkpoint, tmp_path, sentence, answer):
    shape = record(checkpoint, tmp_path / "shape", requests=2, privacy="shape")
    assert "record with --log full" in sentence("exec", shape) and "--log full" in sentence("bisect", shape)
    other = save_checkpoint(tmp_path / "other", rms_norm_eps=1e-6)
    assert "another model than the log's" in sentence("exec", full_log, "--model", other)
    assert answer("exec", full_log, "--model", other, "--any-model")[1]["tokens"] > 150
    smaller = save_checkpoint(tmp_path / "smaller", vocab_size=60)
    assert "61 in the log, 60 here" in sentence("exec", full_log, "--model", smaller, "--any-model")
    assert "give the model with --model" in sentence("exec", record_of_nowhere(full_log, tmp_path / "moved"))
    assert "no/model" in sentence("exec", full_log, "--model", "/no/model/here")
    assert "choose of torch" in sentence("exec", full_log, "--kernels", "fast")
    assert "bfloat16" in sentence("exec", full_log, "--quantization", "int8", "--dtype", "float32")
    assert "at least 1" in sentence("exec", full_log, "--tp", "0")
    assert "do not split over 3 ranks" in sentence("exec", full_log, "--tp", "3")
    assert "whole numbers" in sentence("exec", full_log, "--steps", "x:")
    assert "holds no step" in sentence("exec", full_log, "--steps", "5:5")
    assert "nothing was compared" in sentence("exec", full_log, "--steps", "100000:")
    assert "both runs would be the same" in sentence("bisect", full_log, "--tp", "1")
    damaged = with_other_token(full_log, tmp_path / "damaged", 9, 0, 61)
    assert "token 61" in sentence("exec", damaged)


@pytest.mark.parametrize("seed", range(12))
def test_nasty_values_behind_right_checksums_end_in_an_answer_or_a_sentence(full_log, tmp_path, capsys, seed):
    rng = random.Random(seed)
    (path,) = full_log.glob("*.vnextlog")
    data = path.read_bytes()
    for number in range(3):
        bad = tmp_path / f"bad-{number}.vnextlog"
        bad.write_bytes(with_nasty_parts(data, rng, rng.choice((0, rng.randint(1, 30)))))
        for command in (["exec", str(bad)], ["exec", str(bad), "--solo"], ["bisect", str(bad), "--steps", ":3"]):
            code = main(command)
            reported = capsys.readouterr()
            assert code in (0, 1) or (
                code == 2 and reported.err.startswith("vnext-replay: ") and reported.err.count("\n") == 1
            )
