"""redact, cut, merge, convert: decisions proved unchanged, exact round trips, one sentence where something does not fit."""

from __future__ import annotations

import codecs
import json
import random
import shutil
from pathlib import Path

import msgspec
import pytest
from log_drive import drawn_config, engine, record, small_config, started

from vnext.log.codec import Frame
from vnext.replay.answers import slices
from vnext.replay.answers.arrivals import from_jsonl, from_mooncake, to_jsonl, to_mooncake
from vnext.replay.answers.convert import answers_of, arrivals_of, from_vcr, hashes
from vnext.replay.answers.slices import cut, decisions_of, merge, redact
from vnext.replay.answers.slow import slow
from vnext.replay.cli.main import main
from vnext.replay.reading.folding import Folded, first_state, fold
from vnext.replay.reading.index import Index
from vnext.replay.reading.show import state_at
from vnext.replay.reading.source import UnusableLog, open_log
from vnext.replay.reading.times import timestamps_of
from vnext.replay.reading.verify import verify
from vnext.state.digest import digest
from vnext.state.events import RequestArrived, StepCommitted, StepPlanned, unpack_tokens


def answer(capsys, *arguments: object) -> tuple[int, dict]:
    code = main([*map(str, arguments), "--json"])
    return code, json.loads(capsys.readouterr().out)


def frames(log_dir: Path) -> list[Frame]:
    return [item for item in open_log(log_dir).items() if isinstance(item, Frame)]


# ---- redact ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [10**6, 3000])
@pytest.mark.parametrize("seed", range(4))
def test_redacting_changes_no_decision_and_leaves_no_text(tmp_path, seed, size):
    log_dir = record(tmp_path / "log", "full", drawn_config(random.Random(seed)), seed, arrivals=60, size=size)
    found = redact(open_log(log_dir), tmp_path / "out", segment_bytes=size)
    assert found.same and found.decisions == found.decisions_again == f"{decisions_of(open_log(log_dir)):016x}"
    verdict = verify(open_log(tmp_path / "out"), all_laws=True)
    assert verdict.same and verdict.snapshots == len(list((tmp_path / "out").iterdir())) - 1, verdict.difference
    assert verdict.rank_digests == verify(open_log(log_dir)).rank_digests > 0
    events = zip(*([each for frame in frames(path) for each in frame.events] for path in (log_dir, tmp_path / "out")))
    for real, shaped in events:
        if isinstance(real, RequestArrived):
            assert shaped.name == str(real.id) and "secret" not in shaped.cache_salt and shaped.sampling.seed == 0
            assert unpack_tokens(shaped.prompt).min() >= 6 > unpack_tokens(real.prompt).max()
        elif not isinstance(real, StepCommitted):
            assert shaped == real
    assert all(segment.stat().st_size for segment in (tmp_path / "out").iterdir())
    assert not any(b"secret" in segment.read_bytes() for segment in (tmp_path / "out").iterdir())


def test_a_redaction_that_changed_a_decision_would_be_seen(tmp_path, capsys, monkeypatch):
    """A shaper that cuts one prompt short: another log, another number."""
    log_dir = record(tmp_path / "log")
    real = slices.Redactor.redact

    def wrong(self, before, event, matched=None):
        shaped = real(self, before, event, matched)
        if isinstance(shaped, RequestArrived) and shaped.id == 3 and len(shaped.prompt) > 4:
            return msgspec.structs.replace(shaped, prompt=shaped.prompt[:-4])
        return shaped

    monkeypatch.setattr(slices.Redactor, "redact", wrong)
    code, found = answer(capsys, "redact", log_dir, "-o", tmp_path / "out")
    assert code == 1 and found["decisions"] != found["decisions_again"] and not found["same"]


@pytest.mark.parametrize("seed", range(12))
def test_a_ring_is_redacted_from_where_it_begins(tmp_path, seed):
    """What lives there, what is kept there, and whose salt it was: shared again by later requests, under pseudonyms."""
    config = drawn_config(random.Random(seed))
    ring = record(tmp_path / "ring", "full", config, seed, arrivals=125, size=3000, max_bytes=12_000, timestamped=True)
    log = open_log(ring)
    first = first_state(log)
    assert log.header.index > 0 and first.requests and any(first.pool.prefix_index.keys())
    found = redact(log, tmp_path / "out", segment_bytes=3000)
    assert found.same and found.decisions == f"{decisions_of(log):016x}" and found.first_step == first.planned
    verdict = verify(open_log(tmp_path / "out"), all_laws=True)
    assert verdict.same and verdict.snapshots == len(open_log(tmp_path / "out").paths) - 1, verdict.difference
    assert timestamps_of(open_log(tmp_path / "out")) is not None
    assert not any(b"secret" in path.read_bytes() for path in (tmp_path / "out").glob("*.vnextlog"))
    named = [name for name in first.pool.prefix_index.keys() if name is not None]
    assert not any(name in path.read_bytes() for name in named for path in (tmp_path / "out").glob("*.vnextlog"))


# ---- cut and merge -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("privacy", ["full", "shape"])
@pytest.mark.parametrize("seed", range(3))
def test_a_cut_is_a_log_with_the_same_states(tmp_path, privacy, seed):
    log_dir = record(tmp_path / "log", privacy, drawn_config(random.Random(seed)), seed, arrivals=60, size=4000)
    whole = Index(open_log(log_dir))
    steps, rng = whole.last.planned, random.Random(seed)
    for number, (first, end) in enumerate(
        [(0, 9), (steps // 2, None), *(sorted(rng.sample(range(steps), 2)) for _ in range(4))]
    ):
        found = cut(whole, tmp_path / f"cut-{number}", first, end)
        log = open_log(tmp_path / f"cut-{number}")
        assert found.same and verify(log, all_laws=True).same and found.first_step == first
        assert found.last_step == (end or steps) - 1
        for step in {first, (first + (end or steps)) // 2, (end or steps) - 1}:
            assert digest(state_at(Index(log), step)[0]) == digest(state_at(whole, step)[0])
        plans = [
            event.step
            for frame in frames(tmp_path / f"cut-{number}")
            for event in frame.events
            if isinstance(event, StepPlanned)
        ]
        assert plans == list(range(first, end or steps))


@pytest.mark.parametrize("privacy", ["full", "shape"])
def test_slices_merge_to_the_very_bytes_they_were_cut_from(tmp_path, privacy):
    log_dir = record(tmp_path / "log", privacy, arrivals=60)
    index = Index(open_log(log_dir))
    for name, (first, end) in {"a": (0, 20), "b": (20, 55), "c": (50, None)}.items():
        cut(index, tmp_path / name, first, end)
    found = merge([open_log(tmp_path / name) for name in "cab"], tmp_path / "merged")
    assert found.same and (found.first_step, found.last_step) == (0, index.last.planned - 1)
    name = "segment-000000.vnextlog"
    assert (tmp_path / "merged" / name).read_bytes() == (log_dir / name).read_bytes()
    cut(index, tmp_path / "d", 5, 12)  # within a
    assert merge([open_log(tmp_path / name) for name in "cdab"], tmp_path / "more").same
    assert (tmp_path / "more" / name).read_bytes() == (log_dir / name).read_bytes()
    again = merge([open_log(tmp_path / name) for name in "bc"], tmp_path / "tail")
    assert again.first_step == 20 and verify(open_log(tmp_path / "tail"), all_laws=True).same


def test_what_does_not_fit_is_said_in_one_sentence(tmp_path, capsys):
    log_dir, other = record(tmp_path / "log", arrivals=40), record(tmp_path / "other", seed=2, arrivals=40)
    index = Index(open_log(log_dir))
    for name, source, first, end in (("a", index, 0, 20), ("c", index, 30, None), ("x", Index(open_log(other)), 20, None)):
        cut(source, tmp_path / name, first, end)
    cut(Index(open_log(other)), tmp_path / "within", 5, 20)
    assert main(["redact", str(log_dir), "-o", str(tmp_path / "shape")]) == 0
    capsys.readouterr()
    (tmp_path / "noise").write_bytes(b"\x00\xff not json")
    (tmp_path / "wrong.jsonl").write_text('{"arrival_ns": 1, "prompt": [1], "sampling": {"seed": 1, "max_tokens": "x"}}\n')
    (tmp_path / "odd.jsonl").write_text('{"timestamp": 1, "input_length": 600, "output_length": 1, "hash_ids": [1]}\n')
    out = ["-o", str(tmp_path / "new")]
    cases = (
        (["cut", log_dir, 20, 20, *out], "no step lies from 20 to before 20"),
        (["cut", log_dir, 10**6, *out], "step 1000000 is not in this log"),
        (["cut", log_dir, 0, 9, "-o", tmp_path / "a"], "is not empty: name a new folder"),
        (["merge", tmp_path / "a", tmp_path / "c", *out], "and the parts before it end at event"),
        (["merge", tmp_path / "a", tmp_path / "x", "-o", tmp_path / "new2"], "at event"),
        (["merge", log_dir, tmp_path / "within", "-o", tmp_path / "new3"], "is of another run"),
        (["redact", tmp_path / "shape", *out], "holds no text already"),
        (["convert", tmp_path / "noise", "--to", "jsonl", *out], "neither a log nor a file of requests"),
        (["convert", tmp_path / "wrong.jsonl", "--to", "jsonl", "-o", tmp_path / "n4"], "line 1 is no request"),
        (["convert", tmp_path / "odd.jsonl", "--to", "jsonl", "-o", tmp_path / "n5"], "line 1 is no request of a Mooncake"),
        (["convert", log_dir, "--to", "jsonl", "-o", tmp_path / "noise"], "is there already"),
    )
    for arguments, sentence in cases:
        assert main([str(argument) for argument in arguments]) == 2, arguments
        error = " ".join(capsys.readouterr().err.split())
        assert sentence in error and error.startswith("vnext-replay: "), error


def test_slices_of_an_older_log_have_digests_of_their_own(tmp_path, root):
    """What ranks told in another version of digests is not taken for drift."""
    shutil.copytree(root / "tests" / "golden" / "logs" / "digest-1-start", tmp_path / "old")
    old = Index(open_log(tmp_path / "old"))
    for number, (first, end) in enumerate([(0, 20), (20, None)]):
        assert cut(old, tmp_path / f"{number}", first, end).same
        verdict = verify(open_log(tmp_path / f"{number}"), all_laws=True)
        assert verdict.same and verdict.digests > 0 and verdict.digests_unchecked == "" and verdict.rank_digests == 0
    merged = merge([open_log(tmp_path / name) for name in "10"], tmp_path / "merged")
    assert merged.same and merged.decisions == f"{decisions_of(old.log):016x}"


# ---- convert -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("privacy", ["full", "shape"])
def test_arrivals_go_to_jsonl_and_back_exactly(tmp_path, capsys, privacy):
    log_dir = record(tmp_path / "log", privacy, arrivals=40)
    due = list(arrivals_of(open_log(log_dir)))
    code, found = answer(capsys, "convert", log_dir, "--to", "jsonl", "-o", tmp_path / "a.jsonl")
    assert code == 0 and found["requests"] == 40 and found["source"] == "log"
    assert list(from_jsonl((tmp_path / "a.jsonl").read_bytes().splitlines())) == due
    (tmp_path / "w.jsonl").write_bytes(codecs.BOM_UTF8 + (tmp_path / "a.jsonl").read_bytes().replace(b"\n", b"\r\n"))  # by Windows
    code, found = answer(capsys, "convert", tmp_path / "w.jsonl", "--like", log_dir, "-o", tmp_path / "again")
    assert code == 0 and list(arrivals_of(open_log(tmp_path / "again"))) == due
    assert verify(open_log(tmp_path / "again"), all_laws=True).same
    assert main(["convert", str(tmp_path / "again"), "--to", "jsonl", "-o", str(tmp_path / "b.jsonl")]) == 0
    assert (tmp_path / "a.jsonl").read_bytes() == (tmp_path / "b.jsonl").read_bytes()


def mooncake_lines(seed: int, count: int = 40) -> list[bytes]:
    """A trace as Mooncake publishes them: prompts that continue earlier ones, ids numbered in order of first mention."""
    rng, known, lines, next_id = random.Random(seed), [[]], [], 0
    for number in range(count):
        history = rng.choice(known)
        fresh = list(range(next_id, next_id + rng.randint(1, 3)))
        next_id += len(fresh)
        hash_ids = history[: rng.randint(0, len(history))] + fresh
        known.append(hash_ids[:-1])  # the last block is not full, as a rule
        length = 512 * (len(hash_ids) - 1) + rng.randint(1, 512)
        reported = {
            "timestamp": 3000 * number,
            "input_length": length,
            "output_length": rng.randint(1, 900),
            "hash_ids": hash_ids,
        }
        lines.append(json.dumps(reported, separators=(",", ":")).encode())
    return lines


@pytest.mark.parametrize("seed", range(5))
def test_mooncake_traces_come_back_as_they_were(tmp_path, seed):
    lines = mooncake_lines(seed)
    arrivals = list(from_mooncake(lines, 10**18))
    assert list(to_mooncake(arrivals, {}, 10**18)) == lines
    for one, line in zip(arrivals, map(json.loads, lines)):
        for other, theirs in zip(arrivals, map(json.loads, lines)):
            shared = next((n for n, (a, b) in enumerate(zip(line["hash_ids"], theirs["hash_ids"])) if a != b), None)
            if shared is not None:
                assert one.prompt[: 2048 * shared] == other.prompt[: 2048 * shared]
                at = slice(2048 * shared, 2048 * (shared + 1))
                assert one.prompt[at][:20] != other.prompt[at][:20]
    assert list(from_jsonl(to_jsonl(arrivals))) == arrivals, "and through the other form"


def test_a_log_becomes_a_mooncake_trace_with_the_answers_it_had(tmp_path, capsys):
    log_dir = record(tmp_path / "log", arrivals=40)
    code, found = answer(capsys, "convert", log_dir, "--to", "mooncake", "-o", tmp_path / "trace.jsonl")
    lines = [json.loads(line) for line in (tmp_path / "trace.jsonl").read_text().splitlines()]
    reported = answers_of(open_log(log_dir))
    sampled = {
        item.event.id: 0
        for item in fold(open_log(log_dir))
        if isinstance(item, Folded) and isinstance(item.event, RequestArrived)
    }
    assert code == 0 and len(lines) == found["requests"] == len(sampled) == 40
    assert [line["output_length"] for line in lines] == [reported[number] for number in range(40)]
    assert all(len(line["hash_ids"]) == 1 for line in lines) and max(reported.values()) > 5
    code, found = answer(capsys, "convert", tmp_path / "trace.jsonl", "--to", "jsonl", "-o", tmp_path / "a.jsonl")
    assert code == 0 and found["source"] == "mooncake"


@pytest.mark.parametrize("privacy", ["full", "shape"])
def test_a_log_becomes_a_vllm_vcr_trace_and_its_arrivals_come_back(tmp_path, capsys, privacy):
    log_dir = record(tmp_path / "log", privacy, arrivals=40, timestamped=True)
    code, found = answer(capsys, "convert", log_dir, "--to", "vllm-vcr", "-o", tmp_path / "trace.jsonl")
    meta, *lines = [json.loads(line) for line in (tmp_path / "trace.jsonl").read_text().splitlines()]
    due, reported = list(arrivals_of(open_log(log_dir))), answers_of(open_log(log_dir))
    began_ns = open_log(log_dir).header.started.started_ns
    assert code == 0 and meta["meta"]["block_size"] == 16 and found["requests"] == len(lines) > 30
    latency = {entry.ms for entry in slow(Index(open_log(log_dir)), 40).firsts}
    assert {round(ms, 3) for ms in latency} >= {line["ttft_ms"] for line in lines}
    of = {round(line["arrival_ms"] * 1e6): line for line in lines}
    kept = [event for event in due if event.arrival_ns - began_ns in of]
    assert len(kept) == len(of) == len(lines)
    for event in kept:
        line = of[event.arrival_ns - began_ns]
        assert (line["prompt_tokens"], line["output_tokens"]) == (len(event.prompt) // 4, reported[event.id])
        assert len(line.get("itl_ms", ())) == line["output_tokens"] - 1 and line.get("cached_tokens", 0) <= line["prompt_tokens"]
    code, found = answer(capsys, "convert", tmp_path / "trace.jsonl", "--to", "jsonl", "-o", tmp_path / "a.jsonl")
    again = list(from_jsonl((tmp_path / "a.jsonl").read_bytes().splitlines()))
    assert found["source"] == "vllm-vcr" and [event.arrival_ns for event in again] == sorted(began + began_ns for began in of)
    assert main(["convert", str(tmp_path / "a.jsonl"), "--to", "vllm-vcr", "-o", str(tmp_path / "b.jsonl")]) == 2
    assert "convert a log to it" in " ".join(capsys.readouterr().err.split())


def test_prompts_of_a_vllm_vcr_trace_share_what_their_hashes_share():
    def line(**reported) -> bytes:
        return json.dumps({"ttft_ms": 1.5, "output_tokens": 3, **reported}).encode()

    lines = [
        b'{"meta":{"model":"m","block_size":8,"vllm_version":"x"}}',
        line(prompt_tokens=20, arrival_ms=2.25, block_hashes=[2**63 + 5, 7], finish_reason="stop", itl_ms=[1.0, 2.0]),
        line(prompt_tokens=17, arrival_ms=0.5, block_hashes=[2**63 + 5, 9]),
        line(prompt_tokens=16, arrival_ms=9, block_hashes=[2**63 + 5, 7]),
        line(prompt_tokens=3, arrival_ms=10),
    ]
    first, second, third, last = list(from_vcr(lines, 10**9))
    assert [event.arrival_ns for event in (first, second, third, last)] == [
        10**9 + ns for ns in (500_000, 2_250_000, 9_000_000, 10_000_000)
    ]
    assert [len(event.prompt) // 4 for event in (first, second, third, last)] == [17, 20, 16, 3]
    shared = [hashes(event.prompt, "", 8) for event in (first, second, third)]
    assert shared[0][0] == shared[1][0] and shared[0][1] != shared[1][1] and shared[1] == shared[2]
    assert second.prompt[64:] != first.prompt[64:68] and first.sampling.max_tokens == 3
    for wrong, words in (
        (line(prompt_tokens=20, arrival_ms=1, block_hashes=[1]), "1 block_hashes for 20 tokens"),
        (line(prompt_tokens=2**40, arrival_ms=1), "prompt_tokens is"), (line(prompt_tokens=3), "no arrival_ms"),
        (line(prompt_tokens=3, arrival_ms=1e300), "arrival_ms is"), (b'{"prompt_tokens": 1}', "line 2 is no request"),
    ):
        with pytest.raises(UnusableLog, match=words):
            list(from_vcr([lines[0], wrong], 0))


def test_requests_that_an_engine_cannot_serve_are_refused(tmp_path, capsys):
    log_dir = record(tmp_path / "log")
    (tmp_path / "trace.jsonl").write_bytes(b"\n".join(mooncake_lines(1)))
    assert main(["convert", str(tmp_path / "trace.jsonl"), "--like", str(log_dir), "-o", str(tmp_path / "new")]) == 2
    assert "request 0 cannot be served by that engine" in " ".join(capsys.readouterr().err.split())


def test_a_log_with_a_gap_is_not_copied_silently(tmp_path):
    from vnext.runtime.record.recorder import Recorder

    recorder = Recorder.open(tmp_path / "log", started(small_config()), "full")
    for number, (events, befores, after, reports) in enumerate(engine(small_config(), 4, 10)):
        if number == 4:
            recorder._lost_now, recorder._next_event = 2, recorder._next_event + 3
        recorder.append(events, befores, digest(after), reports)
    recorder.close()
    with pytest.raises(UnusableLog, match="can be folded up to event"):
        redact(open_log(tmp_path / "log"), tmp_path / "out")
