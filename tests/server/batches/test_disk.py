"""/v1/files and /v1/batches where the disk is full or the folder cannot be written: one sentence, and nothing is lost."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest
from edge_server import EdgeServer
from fake_engine import wait_until
from test_batches import ended, line, results, start, upload

from vnext.runtime.protocol.messages import SubmitRequest
from vnext.server.batches import store as store_module, worker as worker_module
from vnext.server.batches.service import Batches
from vnext.server.context.errors import StoreUnusable

SENTENCE = r"The server's folder for files and batches cannot be written \(.*\): make room, then send the request again."
pytestmark = pytest.mark.usefixtures("nobody_waits")


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_module, "WRITE_PAUSE_S", 0.01)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """[whether a batch may begin requests]."""
    found = [True]
    monkeypatch.setattr(Batches, "_is_free", lambda self: found[0])
    return found


@pytest.fixture
def server(tmp_path: Path, gate: list[bool]) -> Iterator[EdgeServer]:
    with EdgeServer(batch_dir=str(tmp_path / "kept")) as running:
        yield running


def refused(server: EdgeServer, *calls: object) -> None:
    """Each of the calls gets the sentence, and the server lives."""
    for call in calls:
        with pytest.raises(openai.InternalServerError, match=SENTENCE) as found:
            call()  # type: ignore[operator]
        assert found.value.status_code == 507 and found.value.code == "storage_failed"
    assert server.openai().completions.create(model="toy", prompt="say:live").choices[0].text == "live"


@pytest.mark.parametrize("folder", ["files", "batches"])
def test_a_folder_that_is_away_and_comes_back(server: EdgeServer, tmp_path: Path, folder: str) -> None:
    client, at = server.openai(), tmp_path / "kept" / folder
    kept = upload(server, line("a", "say:x"))
    at.rename(tmp_path / "away")
    create = lambda: client.batches.create(input_file_id=kept, endpoint="/v1/completions", completion_window="24h")  # noqa: E731
    refused(server, create if folder == "batches" else lambda: upload(server, line("b", "say:y")))
    assert [each.id for each in client.files.list()] == [kept] and [*client.batches.list()] == []
    (tmp_path / "away").rename(at)
    assert ended(server, create().id).status == "completed"


def test_a_disk_that_is_full_during_an_upload(server: EdgeServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    full = tmp_path / "full"
    full.symlink_to("/dev/full")
    with monkeypatch.context() as held:
        held.setattr(store_module.Store, "draft", lambda self, tenant: full)
        refused(server, lambda: upload(server, line("a", "say:x")))
    assert [*server.openai().files.list()] == [] and not full.exists()
    assert upload(server, line("a", "say:x"))


@pytest.mark.parametrize("kind", ["answers", "errors"])
def test_a_disk_that_is_full_while_a_batch_runs(
    server: EdgeServer, gate: list[bool], tmp_path: Path, caplog: pytest.LogCaptureFixture, kind: str
) -> None:
    """The batch waits, and goes on where it stood: what was written is not computed again, other requests are answered."""
    gate[0] = False
    lines = [line(f"r{number}", f"say:{number}", **({"temperature": -1} if number == 7 else {})) for number in range(8)]
    batch = start(server, *lines)
    wait_until(lambda: server.openai().batches.retrieve(batch.id).status == "in_progress")
    path = tmp_path / "kept" / "batches" / f"{batch.id}.{kind}"
    path.symlink_to("/dev/full")
    gate[0] = True
    wait_until(lambda: caplog.text.count("waits until its folder can be written (No space left on device)") > 1)
    assert server.openai().completions.create(model="toy", prompt="say:live").choices[0].text == "live"
    assert server.openai().batches.retrieve(batch.id).status == "in_progress"
    os.unlink(path)
    found = ended(server, batch.id)
    assert (found.status, found.request_counts.completed, found.request_counts.failed) == ("completed", 7, 1)
    assert {*results(server, found.output_file_id)} == {f"r{number}" for number in range(7)}
    assert {*results(server, found.error_file_id)} == {"r7"}


def test_an_end_that_cannot_be_kept(server: EdgeServer, gate: list[bool], tmp_path: Path) -> None:
    """Of a cancelled batch too: the worker tries again, and the next batch is answered."""
    gate[0] = False
    batch = start(server, line("a", "say:x"))
    wait_until(lambda: server.openai().batches.retrieve(batch.id).status == "in_progress")
    (tmp_path / "kept" / "batches").rename(tmp_path / "away")
    refused(server, lambda: server.openai().batches.cancel(batch.id))
    (tmp_path / "away").rename(tmp_path / "kept" / "batches")
    assert server.openai().batches.cancel(batch.id).status in ("cancelling", "cancelled")
    assert ended(server, batch.id).status == "cancelled"
    assert len(server.engine.of_kind(SubmitRequest)) == 1, "only the live request"
    gate[0] = True
    assert ended(server, start(server, line("b", "say:y")).id).status == "completed"


def test_a_line_is_written_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "answers"
    store_module.append(path, b"one\n")

    class Short:
        """A file on a disk that has room for two bytes."""

        def __init__(self, file) -> None:
            self._file = file

        def __enter__(self):
            return self

        def __exit__(self, *_) -> None:
            self._file.close()

        def write(self, data: bytes) -> int:
            return self._file.write(data[:2])

        def __getattr__(self, name: str):
            return getattr(self._file, name)

    monkeypatch.setattr(store_module, "open", lambda *arguments, **options: Short(open(*arguments, **options)), raising=False)
    with pytest.raises(StoreUnusable, match="No space left"):
        store_module.append(path, b"two\n")
    monkeypatch.undo()
    assert path.read_bytes() == b"one\n"


def test_a_folder_that_cannot_be_used_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "files").write_text("no folder")
    with pytest.raises(StoreUnusable, match="choose another with --batch-dir"):
        store_module.Store(tmp_path)


def test_only_this_user_reads_prompts_and_answers(server: EdgeServer, tmp_path: Path) -> None:
    before = os.umask(0o022)
    try:
        ended(server, start(server, line("a", "say:secret")).id)
    finally:
        os.umask(before)
    kept = [path for name in ("files", "batches") for path in (tmp_path / "kept" / name).rglob("*")]
    assert len(kept) >= 5 and not [path for path in (*kept, *{path.parent for path in kept}) if path.stat().st_mode & 0o077]
