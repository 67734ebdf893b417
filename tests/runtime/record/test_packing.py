"""Packed segments: the same bytes in less room, any part of them at once, and nothing believed that is damaged."""

from __future__ import annotations

import io
import random
import statistics
import struct
import tracemalloc
import zlib
from pathlib import Path

import pytest
from log_drive import engine, record, small_config, started

from vnext.log import compression
from vnext.log.codec import Frame, LogEnd
from vnext.log.reading import read
from vnext.replay.cli.main import main
from vnext.replay.reading.index import Index
from vnext.replay.reading.show import state_at
from vnext.replay.reading.source import UnusableLog, contents, open_log, part_of
from vnext.replay.reading.verify import verify
from vnext.runtime.record.compressor import SUFFIX, Compressor
from vnext.runtime.record.recorder import Recorder
from vnext.runtime.record.segments import Bounds
from vnext.server.views import log_view
from vnext.state.digest import digest

CONFIG = small_config(page_count=18)


def packed_bytes(data: bytes) -> bytes:
    blocks = [
        compression.compress_block(data[at : at + compression.BLOCK_BYTES])
        for at in range(0, len(data), compression.BLOCK_BYTES)
    ]
    return compression.head_of(len(data), list(map(len, blocks))) + b"".join(blocks)


def narrow_events(log_dir: Path, but_last: bool = True) -> list[Path]:
    compressor, paths = Compressor(), sorted(log_dir.glob("*.vnextlog"))
    for path in paths[: len(paths) - but_last]:
        compressor.add(path)
    compressor.finish()
    return [path for path in paths if path.read_bytes().startswith(compression.MAGIC)]


def small_blocks(monkeypatch, size: int = 300) -> None:
    monkeypatch.setattr(compression, "BLOCK_BYTES", size)


def test_any_part_is_the_same(monkeypatch):
    small_blocks(monkeypatch, 64)
    rng = random.Random(4)
    data = b"".join(rng.choice((b"steady ", b"frame ")) for _ in range(160)) + rng.randbytes(40)
    content = compression.Content(io.BytesIO(packed_bytes(data)))
    assert content.size == len(data) and content.read() == data
    for _ in range(200):
        at, count = rng.randrange(len(data) + 50), rng.randrange(300)
        assert content.read(at, count) == data[at : at + count]


@pytest.mark.parametrize("privacy", ["full", "shape"])
def test_a_packed_log_answers_as_the_plain_one(tmp_path, capsys, monkeypatch, privacy):
    """Every command's words are the same, the index that was made before it was packed still serves, and diff sees no
    difference."""
    small_blocks(monkeypatch)
    plain = record(tmp_path / "log", privacy, CONFIG, arrivals=110, size=3000, timestamped=True)
    twin = tmp_path / "twin"
    twin.mkdir()
    for path in plain.iterdir():
        (twin / path.name).write_bytes(path.read_bytes())

    def reported(path: Path) -> list[str]:
        words = []
        for command in (
            ["verify", "--laws"],
            ["show", "40"],
            ["req", "9"],
            ["slow"],
            ["stat"],
            ["ranks"],
            ["watch", "--once", "--whole"],
        ):
            assert main([command[0], str(path), *command[1:], "--json"]) == 0
            words.append(capsys.readouterr().out)
        return words

    due = reported(plain)
    before = b"".join(contents(open_log(plain).paths))
    assert len(narrow_events(plain)) == len(open_log(plain).paths) - 1 > 2
    assert b"".join(contents(open_log(plain).paths)) == before and reported(plain) == due
    index = Index(open_log(plain))
    assert state_at(index, 40)[0].planned == 41
    assert {segment.source for segment in index.segments if segment._directory} == {"cache"}
    assert log_view._segments(plain) == log_view._segments(twin), "a viewer of a running engine is told the same"
    for path in open_log(plain).paths:
        assert log_view._part(path, 700) == log_view._part(twin / path.name, 700)
    assert main(["diff", str(plain), str(twin)]) == main(["diff", str(twin), str(plain)]) == 0
    main(["info", str(plain)])
    assert "packed" in capsys.readouterr().out


def test_what_is_damaged_ends_a_reading(tmp_path, monkeypatch):
    """Every byte flipped, every length cut: no event that was not written, and no complete end where one is missing."""
    small_blocks(monkeypatch, 200)
    path = sorted(record(tmp_path, "full", small_config(), arrivals=4).glob("*.vnextlog"))[0]
    frames = [item for item in read([path.read_bytes()]) if isinstance(item, Frame)]
    whole = packed_bytes(path.read_bytes())
    for place in range(len(whole)):
        flipped = bytearray(whole)
        flipped[place] ^= 1 << place % 8
        for bad in (bytes(flipped), whole[:place]):
            *found, end = read([compression.Content(io.BytesIO(bad)).read()])
            assert isinstance(end, LogEnd)
            got = [item for item in found if isinstance(item, Frame)]
            assert got == frames[: len(got)] and (end.kind != "complete" or got == frames)


def test_a_packed_file_reserves_no_memory():
    """Sizes by the billion, and a megabyte of zeros in a kilobyte: at most twice the file, a part at a time."""
    bomb = zlib.compress(bytes(compression.BLOCK_BYTES_MAX * 8))
    huge = struct.pack("<8sQII", compression.MAGIC, 2**62, 2**18, 2**32 - 1)
    sane = compression.head_of(compression.BLOCK_BYTES * 64, [len(bomb)] * 64) + bomb * 64
    for bad in (huge, huge + bytes(2**20), sane, compression.head_of(2**40, [9] * 8)):
        tracemalloc.start()
        content = compression.Content(io.BytesIO(bad))
        assert content.size <= compression.GROWTH_MAX * len(bad)
        content.read(0, 1000)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 2 * len(bad) + 3 * compression.BLOCK_BYTES


def test_a_head_of_more_blocks_than_the_file_has_room_for_reserves_none(tmp_path):
    """A file's read takes the room that it is asked for before it has read anything."""
    path, blocks = tmp_path / "packed", 2**24
    path.write_bytes(struct.pack("<8sQII", compression.MAGIC, blocks, 1, blocks) + bytes(100))
    tracemalloc.start()
    with path.open("rb") as file:
        content = compression.Content(file)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert content.size == path.stat().st_size and peak < blocks


def test_an_engine_packs_what_it_closed_and_keeps_its_bound(tmp_path, monkeypatch):
    """The ring holds more for the same room; a segment that was deleted while it was packed does not come back."""
    small_blocks(monkeypatch, 4096)
    kept = []
    for packs in (False, True):
        log_dir = tmp_path / str(packs)
        recorder = Recorder.open(
            log_dir, started(CONFIG), "full", Bounds(segment_bytes=2000, max_bytes=400_000, compressed=packs)
        )
        sizes = []
        for number, (events, befores, after, ranks) in enumerate(engine(CONFIG, 1, 2000)):
            recorder.append(events, befores, digest(after), ranks)
            if packs:
                recorder._files._compressor._wanted.join()
            assert sum(path.stat().st_size for path in log_dir.iterdir()) <= 400_000
            if number % 40 == 0:
                sizes.append(open_log(log_dir).size_bytes)
        recorder.close()
        log = open_log(log_dir)
        kept.append(statistics.mean(sizes[len(sizes) // 2 :]))  # the newest segment may just have begun
        assert verify(log, all_laws=True).same and not list(log_dir.glob(f"*{SUFFIX}")) and recorder.failure == ""
    assert kept[1] > 1.3 * kept[0], kept


def test_a_deleted_segment_does_not_come_back_and_a_full_disk_leaves_it(tmp_path, monkeypatch):
    path = sorted(record(tmp_path, "full", CONFIG).glob("*.vnextlog"))[0]
    data = path.read_bytes()
    compressor, writing = Compressor(), compression.compress_block

    def full(block: bytes) -> bytes:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(compression, "compress_block", full)
        compressor.add(path)
        compressor.finish()
    assert path.read_bytes() == data and "No space" in compressor.failure and list(tmp_path.iterdir()) == [path]

    compressor = Compressor()

    def deleted(block: bytes) -> bytes:
        compressor.delete(path)
        return writing(block)

    monkeypatch.setattr(compression, "compress_block", deleted)
    compressor.add(path)
    compressor.finish()
    assert list(tmp_path.iterdir()) == [] and compressor.failure == ""
    with pytest.raises(UnusableLog):
        open_log(path)


def test_noise_is_not_made_larger_and_nothing_less_than_half(tmp_path):
    path = tmp_path / "segment-000000.vnextlog"
    for data in (random.Random(1).randbytes(5000), b""):
        path.write_bytes(data)
        assert narrow_events(tmp_path, but_last=False) == [] and path.read_bytes() == data == part_of(path)
    path.write_bytes(bytes(10**6 + 1))
    assert narrow_events(tmp_path, but_last=False) == [path] and path.stat().st_size == 500_001
    assert part_of(path) == bytes(10**6 + 1)


def test_a_whole_number_of_blocks_is_read_to_its_end(monkeypatch):
    small_blocks(monkeypatch, 64)
    data = b"steady frame now" * 12
    content = compression.Content(io.BytesIO(packed_bytes(data)))
    assert content.read() == data and content.read(64, 64) == data[64:128] and content.read(128) == data[128:]


def test_blocks_that_would_begin_in_the_head_are_no_blocks():
    reported = compression._head.pack(compression.MAGIC, 10, 64, 1) + struct.pack("<Q", compression.head_size(10) - 1)
    data = reported + struct.pack("<I", zlib.crc32(reported)) + bytes(9)
    content = compression.Content(io.BytesIO(data))
    assert content.read() == data and content.size == len(data)
