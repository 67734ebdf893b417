"""Pages as files: what was written comes back or nothing does."""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path

import pytest

from vnext.runtime.hosts.handover import page_files
from vnext.runtime.hosts.handover.page_files import HEADER_BYTES, FolderInUse, PageFiles
from vnext.runtime.protocol.settings import SettingsError

NAME, OTHER = bytes(range(16)), bytes(range(1, 17))
PAGE = bytes(range(256)) * 4


def opened(folder: Path, model: str = "a", age_s: float = 0.0) -> PageFiles:
    return PageFiles(folder, {"model": model}, len(PAGE), age_s)


def read(files: PageFiles, name: bytes = NAME) -> bytes | None:
    buffer = bytearray(files.file_bytes)
    return bytes(buffer[HEADER_BYTES:]) if files.read(name, buffer) else None


def file_of(folder: Path) -> Path:
    return next(path for path in folder.rglob(NAME.hex()))


def test_a_page_comes_back_also_after_a_restart(tmp_path):
    files = opened(tmp_path)
    files.write(NAME, (PAGE[:100], PAGE[100:]))
    assert read(files) == PAGE and read(files, OTHER) is None
    files.close()
    again = opened(tmp_path)
    assert [name for _, name in again.list()] == [NAME] and read(again) == PAGE
    again.close()


def test_each_flipped_byte_is_a_miss(tmp_path):
    files = opened(tmp_path)
    files.write(NAME, (PAGE,))
    path = file_of(tmp_path)
    whole = path.read_bytes()
    for at in (*range(HEADER_BYTES), HEADER_BYTES + 500, len(whole) - 1):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        assert read(files) is None, at
    path.write_bytes(whole)
    assert read(files) == PAGE
    files.close()


def test_a_torn_file_is_no_block(tmp_path):
    files = opened(tmp_path)
    files.write(NAME, (PAGE,))
    path = file_of(tmp_path)
    path.write_bytes(path.read_bytes()[:-1])
    assert read(files) is None
    assert files.list() == [] and not path.exists()
    files.close()


def test_what_another_program_clears_meanwhile_is_no_block(tmp_path):
    """As a link that leads nowhere, a file that is gone when it is looked at has a name and no size."""
    files = opened(tmp_path)
    files.write(NAME, (PAGE,))
    path = file_of(tmp_path)
    path.with_name(OTHER.hex()).symlink_to(tmp_path / "gone")
    (path.parents[1] / "ff").symlink_to(tmp_path / "gone")
    assert [name for _, name in files.list()] == [NAME]
    files.keep(lambda name: False)
    assert files.list() == []
    files.write(OTHER, (PAGE,))
    assert read(files, OTHER) == PAGE
    files.close()


def test_another_models_file_is_a_miss(tmp_path):
    files, others = opened(tmp_path), opened(tmp_path, "b")
    files.write(NAME, (PAGE,))
    assert others.list() == [] and read(others) is None
    path = file_of(tmp_path)
    there = tmp_path / next(each.name for each in tmp_path.iterdir() if each not in path.parents) / path.parent.name / path.name
    there.parent.mkdir()
    there.write_bytes(path.read_bytes())
    assert len(others.list()) == 1 and read(others) is None, "copied by hand, it has another identity"
    files.close()
    others.close()


def test_a_file_under_another_name_is_a_miss(tmp_path):
    files = opened(tmp_path)
    files.write(NAME, (PAGE,))
    path = file_of(tmp_path)
    path.with_name("00" + OTHER.hex()[2:]).write_bytes(path.read_bytes())
    assert read(files, b"\0" + OTHER[1:]) is None
    files.close()


def test_two_engines_on_one_folder_are_refused(tmp_path):
    files = opened(tmp_path)
    with pytest.raises(SettingsError, match="which another engine with this model uses"):
        opened(tmp_path)
    files.close()
    opened(tmp_path).close()


def test_a_folder_is_waited_for_as_long_as_is_asked(tmp_path):
    files = opened(tmp_path)
    with pytest.raises(FolderInUse):
        PageFiles(tmp_path, {"model": "a"}, len(PAGE), lock_wait_s=0.1)
    ending = threading.Timer(0.05, files.close)
    ending.start()
    PageFiles(tmp_path, {"model": "a"}, len(PAGE), lock_wait_s=60).close()
    ending.join()


def test_a_folder_that_cannot_be_written_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(SettingsError, match="name a folder that you can write"):
        opened(tmp_path / "file")


def test_a_full_disk_leaves_nothing_behind(tmp_path, monkeypatch):
    files = opened(tmp_path)

    def full(handle: int, data: memoryview) -> None:
        os.write(handle, data[:10])
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(page_files, "_write_all", full)
    with pytest.raises(OSError, match="No space"):
        files.write(NAME, (PAGE,))
    assert not list(tmp_path.rglob("*.part")) and read(files) is None
    files.close()


def test_what_is_old_leaves_first_and_by_its_age(tmp_path):
    files = opened(tmp_path)
    for at, name in enumerate((NAME, OTHER)):
        files.write(name, (PAGE,))
        os.utime(next(tmp_path.rglob(name.hex())), (1000.0 + at, 1000.0 + at))
    assert [name for _, name in files.list()] == [NAME, OTHER]
    files.touch([NAME])
    assert [name for _, name in files.list()] == [OTHER, NAME]
    files.close()
    young = opened(tmp_path, age_s=3600.0)
    assert [name for _, name in young.list()] == [NAME]
    young.keep(lambda name: False)
    assert young.list() == []
    young.close()
