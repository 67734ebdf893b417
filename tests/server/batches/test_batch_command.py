"""`vnext batch`: a file of requests becomes a file of answers, once, however often the command runs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from vnext.commands import batch
from vnext.commands.cli import main
from vnext.options.reader import BatchCommand, parse
from vnext.runtime.protocol.settings import EngineSettings
from vnext.server.batches import worker
from vnext.server.batches.lines import Answer
from vnext.server.batches.service import asker
from vnext.server.batches.worker import Ask

ENGINE = ["--threads", "1", "--log", "off", "--executor", "inproc", "--max-model-len", "256"]


def requests(path: Path, count: int) -> Path:
    bodies = [{"prompt": f"The module {number}", "max_tokens": 4, "temperature": 0} for number in range(count)] + [
        {"prompt": ""}
    ]
    lines = [
        json.dumps({"custom_id": f"r{number}", "method": "POST", "url": "/v1/completions", "body": body})
        for number, body in enumerate(bodies)
    ]
    path.write_text("\n".join(lines))
    return path


def fail_on(monkeypatch: pytest.MonkeyPatch, faults: dict[str, int]) -> list[str]:
    """The server fails so often on requests with these words; what it was asked."""
    asked: list[str] = []

    def failing(client: object, url: str) -> Ask:
        ask = asker(client, url)

        async def ask_or_fail(path: str, body: bytes) -> Answer:
            asked.append(words := json.loads(body)["prompt"])
            answer = await ask(path, body)
            return answer._replace(status=500, body={"error": {}}) if asked.count(words) <= faults.get(words, 0) else answer

        return ask_or_fail

    monkeypatch.setattr(batch, "asker", failing)
    monkeypatch.setattr(worker, "RETRY_S", 0.01)
    return asked


def test_a_file_is_answered_once(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request on which the server fails is asked again, and left out if that does not end: it has no answer to keep."""
    source, target = requests(tmp_path / "in.jsonl", 5), tmp_path / "out.jsonl"
    asked = fail_on(monkeypatch, {"The module 1": 2, "The module 4": worker.TRIES_MAX})
    assert main(["batch", str(source), "-o", str(target), *ENGINE]) == 1
    assert "out.jsonl has 5 answers; 1 of the new ones are errors; the server failed on 1 others" in capfd.readouterr().err
    assert asked.count("The module 0") == 1 and asked.count("The module 1") == 3 and asked.count("") == 1
    assert main(["batch", str(source), "-o", str(target), *ENGINE]) == 0
    assert asked[-1:] == ["The module 4"] and len(asked) == 1 + 3 + 1 + 1 + 3 + 1 + 1
    lines = target.read_text().splitlines(keepends=True)
    found = {each["custom_id"]: each["response"] for each in map(json.loads, lines)}
    assert [found[f"r{number}"]["status_code"] for number in range(6)] == [200] * 5 + [400]
    assert len(found["r0"]["body"]["choices"][0]["text"]) > 0
    assert "out.jsonl has 6 answers\n" in capfd.readouterr().err
    target.write_text("".join(lines[:3]) + lines[3][:20])
    assert main(["batch", "-i", str(source), "-o", str(target), *ENGINE]) == 0
    again = target.read_text().splitlines(keepends=True)
    assert again[:3] == lines[:3] and {json.loads(each)["custom_id"] for each in again} == {*found} and len(again) == 6


def test_a_full_disk_is_one_sentence(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    source = requests(tmp_path / "in.jsonl", 3)
    assert main(["batch", str(source), "-o", "/dev/full", *ENGINE]) == 1
    said = capfd.readouterr().err
    assert "vnext batch: /dev/full cannot be written (No space left on device): make room" in said and "Traceback" not in said


@pytest.mark.parametrize(
    ("text", "output", "words"),
    [
        (None, "out", "cannot be used"), ("", "out", "holds no request"), ("{", "out", "Line 1 is no request"),
        ("ok", "in.jsonl", "holds something else"), ("ok", "no/such/folder", "cannot be used"),
    ],
)  # fmt: skip
def test_files_that_cannot_be_used_start_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str | None, output: str, words: str
) -> None:
    source = tmp_path / "in.jsonl"
    if text == "ok":
        requests(source, 1)
    elif text is not None:
        source.write_text(text)
    before = source.read_bytes() if source.exists() else None
    assert main(["batch", str(source), "-o", str(tmp_path / output)]) == 2
    assert words in capsys.readouterr().err
    assert before is None or source.read_bytes() == before


def test_the_options() -> None:
    command = parse(["batch", "in", "-o", "out", "--model", "m", "--max-num-seqs", "4"], {})
    assert command == BatchCommand(engine=EngineSettings(model="m", max_num_seqs=4), file="in", output="out")
    with pytest.raises(SystemExit):
        parse(["batch", "in"], {})
