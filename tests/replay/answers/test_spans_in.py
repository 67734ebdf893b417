"""Requests out of other engines' traces and logs: counts, times, names and tokens as told, and one sentence for what tells none.

The files are written by hand, with the names of vLLM (vllm/tracing/utils.py; `llm_request` in v1/engine/output_processor.py) and of
SGLang 0.5.23 (srt/observability/trace.py, srt/utils/request_logger.py and log_utils.py, srt/managers/tokenizer_manager.py,
benchmark/serving.py).
"""

from __future__ import annotations

import json
import random
from pathlib import Path

import numpy as np
import pytest
from log_drive import record

from tests.replay.log_answers import answer
from vnext.replay.answers.convert import answers_of, arrivals_in, arrivals_of
from vnext.replay.answers.spans import from_otlp, from_sglang
from vnext.replay.cli.main import main
from vnext.replay.reading.source import UnusableLog, open_log
from vnext.replay.tables.columns import Log
from vnext.state.events import RequestArrived, unpack_tokens

BEGAN_NS = 1_700_000_000_000_000_000


def span(number: int, begun_ms: float, parent: str = "", **attributes: object) -> dict[str, object]:
    def value(given: object) -> dict[str, object]:
        return {"intValue": str(given)} if isinstance(given, int) else {"stringValue" if isinstance(given, str) else "doubleValue": given}

    told = [{"key": f"gen_ai.{key.replace('__', '.')}", "value": value(each)} for key, each in attributes.items()]
    return {
        "traceId": "5b8efff798038103d269b633813fc60c", "spanId": f"{number:016x}", "parentSpanId": parent, "name": "llm_request",
        "kind": 2, "startTimeUnixNano": str(BEGAN_NS + round(begun_ms * 1e6)), "endTimeUnixNano": str(BEGAN_NS + 10**12),
        "attributes": told, "status": {},
    }  # fmt: skip


def export(*spans: dict[str, object]) -> dict[str, object]:
    resource = {"attributes": [{"key": "service.name", "value": {"stringValue": "vllm-server"}}]}
    return {"resourceSpans": [{"resource": resource, "scopeSpans": [{"scope": {"name": "vllm.llm_engine"}, "spans": list(spans)}]}]}


VLLM = [
    span(3, 30.5, usage__prompt_tokens=7, usage__completion_tokens=0, request__id="cmpl-b", latency__e2e=0.5),
    span(1, 10, usage__prompt_tokens=600, usage__completion_tokens=20, request__id="cmpl-a", request__max_tokens=64,
         request__temperature=0.5, latency__time_to_first_token=0.031),
    span(2, 10.25, f"{1:016x}", latency__e2e=1.5),
]  # fmt: skip
SGLANG_ROOT = span(9, 5, usage__prompt_tokens=12, usage__completion_tokens=3, usage__cached_tokens=4, request__id="rid",
                   response__finish_reasons='["stop"]')  # fmt: skip


def told(arrivals: list[RequestArrived]) -> list[tuple[object, ...]]:
    return [(each.name, each.arrival_ns, len(each.prompt) // 4, each.sampling.max_tokens, each.sampling.ignore_eos) for each in arrivals]


def test_spans_of_vllm_are_requests_in_order_of_arrival() -> None:
    lines = [json.dumps(export(*VLLM)).encode(), json.dumps(export(SGLANG_ROOT, VLLM[1])).encode()]
    found = list(from_otlp(lines, 10**9))
    assert told(found) == [
        ("rid", 10**9, 12, 3, True), ("cmpl-a", 10**9 + 5_000_000, 600, 20, True), ("cmpl-b", 10**9 + 25_500_000, 7, 1, True),
    ]  # fmt: skip
    assert len({each.prompt[:20] for each in found}) == 3 and [each.id for each in found] == [0, 1, 2]


def test_of_a_call_told_by_client_and_server_the_server_counts() -> None:
    """A gateway's span holds one of no tokens, which holds the engine's."""
    counts = {"usage__input_tokens": 9, "usage__output_tokens": 2}
    inner = span(3, 2, f"{2:016x}", usage__prompt_tokens=10, usage__completion_tokens=2, request__id="in")
    spans = [inner, span(1, 0, **counts), span(2, 1, f"{1:016x}"), span(4, 8, **counts, response__id="alone")]
    assert [(name, tokens) for name, _, tokens, *_ in told(list(from_otlp([json.dumps(export(*spans)).encode()], 0)))] == [
        ("in", 10), ("alone", 9),
    ]  # fmt: skip
    with pytest.raises(UnusableLog, match="no request is reported"):
        list(from_otlp([json.dumps(export(span(1, 0, f"{2:016x}", **counts), span(2, 0, f"{1:016x}", **counts))).encode()], 0))


@pytest.mark.parametrize("indent", [None, 2])
def test_what_export_writes_comes_back(tmp_path: Path, capsys: pytest.CaptureFixture[str], indent: int | None) -> None:
    log_dir, spans = record(tmp_path / "log", arrivals=40, timestamped=True), tmp_path / "spans.json"
    assert main(["export", str(log_dir), "--to", "otlp", "-o", str(spans)]) == 0
    spans.write_text(json.dumps(json.loads(spans.read_text()), indent=indent))
    capsys.readouterr()
    code, found = answer(capsys, "convert", spans, "--like", log_dir, "-o", tmp_path / "again")
    assert code == 0 and found["source"] == "otlp"
    rows, sampled = Log(log_dir).requests, answers_of(open_log(log_dir))
    came = {str(name): at for name, at in zip(rows["name"], rows["came"])}
    before = {each.name: each for each in arrivals_of(open_log(log_dir))}
    after = list(arrivals_of(open_log(tmp_path / "again")))
    assert found["requests"] == len(after) > 30
    first = min(came[each.name] for each in after)
    for each in after:
        assert len(each.prompt) == len(before[each.name].prompt)
        assert each.sampling.max_tokens == max(1, sampled.get(before[each.name].id, 0)) or before[each.name].id not in sampled
        assert each.arrival_ns - after[0].arrival_ns == pytest.approx(1e9 * (came[each.name] - first), abs=2000)


# ---- SGLang ------------------------------------------------------------------------------------------------------


def finished(rid: str, second: float, latency_s: float, prompt: int, answer: int | None, **obj: object) -> bytes:
    meta: dict[str, object] = {"id": rid, "finish_reason": {"type": "length", "length": answer}, "prompt_tokens": prompt}
    if answer is not None:
        meta |= {"completion_tokens": answer, "cached_tokens": 0}
    line = {
        "timestamp": f"2026-03-01T12:00:{second:09.6f}", "event": "request.finished", "rid": rid, "obj": {"rid": rid, **obj},
        "out": {"text": "...", "meta_info": meta | {"e2e_latency": latency_s}},
    }  # fmt: skip
    return b"[2026-03-01 12:00:00] " + json.dumps(line, ensure_ascii=False).encode()


SGLANG = [
    b"[2026-03-01 12:00:00] server_args=ServerArgs(model_path='m')",
    b'[2026-03-01 12:00:01] {"timestamp": "2026-03-01T12:00:01.5", "event": "request.received", "rid": "b", "obj": {"rid": "b"}}',
    finished("a", 4.0, 2.0, 5, 3, input_ids=[11, 12, 13, 14, 15], sampling_params={"max_new_tokens": 8}),
    finished("b", 3.25, 1.75, 5000, 40, input_ids=[1, 2, "...", 4, 5]),
    finished("embedding", 3, 1, 9, None),
]


def test_finished_requests_of_sglangs_log_came_their_latency_earlier(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, second = from_sglang(SGLANG, 7)
    assert told([first, second]) == [("b", 7, 5000, 40, True), ("a", 7 + 500_000_000, 5, 3, True)]
    assert unpack_tokens(second.prompt).tolist() == [11, 12, 13, 14, 15]
    (grown,) = from_sglang([finished("image", 3, 1, 6, 2, input_ids=[1, 2, 3])], 0)
    assert len(grown.prompt) == 4 * 6, "tokens of a prompt that grew by an image are not all told"
    (tmp_path / "server.log").write_bytes(b"\n".join(SGLANG))
    (tmp_path / "file.log").write_bytes(b"\n".join(line.partition(b"] ")[2] for line in SGLANG[1:]))
    for name in ("server.log", "file.log"):
        assert told(list(arrivals_in(tmp_path / name)[1])) == told(list(from_sglang(SGLANG, 0)))
        code, found = answer(capsys, "convert", tmp_path / name, "--to", "mooncake", "-o", tmp_path / f"{name}.out")
        assert (code, found["source"], found["requests"]) == (0, "sglang", 2)


# ---- hostile -----------------------------------------------------------------------------------------------------

COUNTS = {"usage__prompt_tokens": 3, "usage__completion_tokens": 3}
FAR = {**span(2, 0, **COUNTS), "startTimeUnixNano": "1"}
NO_START = {key: each for key, each in span(2, 0, **COUNTS).items() if key != "startTimeUnixNano"}
BAD: dict[str, tuple[object, str]] = {
    "no spans": (export(), "no request is reported there"),
    "no counts": (export(span(1, 0, latency__e2e=1.0)), "no request is reported there"),
    "a vast prompt": (export(span(1, 0, usage__prompt_tokens=2**40, usage__completion_tokens=1)), "it has 1099511627776 tokens"),
    "an empty prompt": (export(span(1, 0, usage__prompt_tokens=0, usage__completion_tokens=1)), "it has 0 tokens in its prompt"),
    "a negative answer": (export(span(1, 0, usage__prompt_tokens=1, usage__completion_tokens=-1)), "and -1 in its answer"),
    "half a token": (export(span(1, 0, usage__prompt_tokens=1.5, usage__completion_tokens=1)), "a count of tokens is 1.5"),
    "a count in words": (export(span(1, 0, usage__prompt_tokens="x", usage__completion_tokens=1)), "a count of tokens is None"),
    "far apart": (export(span(1, 0, **COUNTS), FAR), "lie more than three years apart"),
    "before the epoch": (export({**FAR, "startTimeUnixNano": "-5"}), "startTimeUnixNano is -5"),
    "no start": (export(NO_START), "line 1 is no export .*startTimeUnixNano"),
    "another shape": ({"resourceSpans": [{"scopeSpans": [{"spans": 3}]}]}, "line 1 is no export of OpenTelemetry's spans"),
    "a line of SGLang's without counts": ({"event": "request.finished", "rid": "a", "out": {}}, "line 1 is no finished request"),
    "an endless latency": (json.loads(finished("a", 1, 1e300, 1, 1).partition(b"] ")[2]), "line 1 is no finished request"),
    "none finished": ({"event": "request.received", "rid": "a"}, "no request is reported there"),
    "a benchmark's result": ({"backend": "sglang", "request_throughput": 2.5, "input_lens": [3]}, "is a benchmark's result"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_what_tells_no_requests_is_refused_in_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str], case: str) -> None:
    content, sentence = BAD[case]
    (tmp_path / "in").write_text(json.dumps(content))
    assert main(["convert", str(tmp_path / "in"), "--to", "jsonl", "-o", str(tmp_path / "out")]) == 2
    said = capsys.readouterr()
    assert not said.out and said.err.startswith("vnext-replay: ")
    with pytest.raises(UnusableLog, match=sentence):
        list(arrivals_in(tmp_path / "in")[1])


def test_damaged_files_answer_or_are_refused() -> None:
    """Bytes changed, cut out and repeated: requests, or one sentence."""
    rng, refused = random.Random(5), 0
    for reader, whole in ((from_otlp, json.dumps(export(*VLLM, SGLANG_ROOT)).encode()), (from_sglang, SGLANG[2])):
        for _ in range(400):
            data = bytearray(whole)
            for _ in range(rng.randint(1, 4)):
                at = rng.randrange(len(data))
                data[at : at + rng.randint(0, 3)] = rng.choice([b"", b"9" * 30, b"[" * 2000, b"-", bytes([rng.randrange(256)])])
            try:
                found = list(reader([bytes(data)], 0))
            except UnusableLog as error:
                refused += "\n" not in str(error)
            else:
                assert all(0 < len(each.prompt) and each.arrival_ns >= 0 for each in found)
    assert refused > 300


def test_prompts_that_are_made_up_share_nothing() -> None:
    lines = [json.dumps(export(*(span(n + 1, n, usage__prompt_tokens=64, usage__completion_tokens=1) for n in range(200)))).encode()]
    prompts = np.stack([unpack_tokens(each.prompt) for each in from_otlp(lines, 0)])
    assert len(np.unique(prompts[:, :5], axis=0)) == 200
