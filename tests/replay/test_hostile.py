"""Logs that mean harm: random bytes, huge lengths, wrong types and numbers behind right checksums.

Nothing in a file makes the tool raise, run code or take much more memory than the file: it answers, or says one sentence.
"""

from __future__ import annotations

import random
import struct
import subprocess
import sys
import tracemalloc
from pathlib import Path

import msgspec
import pytest
from log_drive import record, small_config

from vnext.replay.cachefile import cache_path
from vnext.replay.cli import main
from vnext.replay.index import Index
from vnext.replay.source import UnusableLog, open_log
from vnext.replay.ui.step import step_view
from vnext.replay.ui.walk import Walk
from vnext.state import log as logs, stamps
from vnext.state.log_plain import RECORD_HEAD, checksum, record_end
from vnext.state.log_read import read
from vnext.state.packed import MAGIC, head_of, pack_block

COMMANDS = (
    ("info",), ("verify",), ("verify", "--laws"), ("show",), ("show", "7"), ("req", "3"), ("stat",), ("ranks",), ("slow",), ("cache",),
    ("diff", "GOOD"), ("cut", "2", "9", "-o", "OUT"), ("redact", "-o", "OUT"), ("merge", "GOOD", "-o", "OUT"),
    ("convert", "--to", "jsonl", "-o", "OUT"), ("convert", "--to", "mooncake", "-o", "OUT"),
    ("convert", "--to", "vllm-vcr", "-o", "OUT"),
    ("trace", "-o", "OUT"), ("what-if", "--set", "running_max=3"), ("shrink", "-o", "OUT"), ("to-test", "-o", "OUT"),
    ("fork", "5", "--forks", "2", "--steps", "30"), ("watch", "--once", "--whole"), ("watch", "--once", "--laws"),
)  # fmt: skip
NASTY = (
    -1, 0, 1, 2**31, 2**32, 2**62, 2**63 - 1, 2**63, 2**64 - 1, -(2**63), 1e308, float("nan"), float("inf"), "", "x" * 3000,
    "os:system", "\x1b[31m\n", b"", b"\xff" * 41, b"\0" * 4096, [], [[]], [0] * 300, {}, None, True,
)  # fmt: skip

SLACK = 3 * 2**19
"""What the tool itself takes for a file of any size: its parser, its tables."""


@pytest.fixture(scope="module")
def good(tmp_path_factory) -> Path:
    """A log of several segments."""
    log_dir, config = tmp_path_factory.mktemp("good") / "log", small_config(block_count=18)
    record(log_dir, "full", config, arrivals=26, size=1200, stamped=True)
    assert len(list(log_dir.glob("*.vnextlog"))) > 2
    return log_dir


def run_all(capsys, path: Path, good: Path, tmp_path: Path) -> list[int]:
    """Every command on a log: its exit codes. One sentence where there is nothing to work with."""
    codes = []
    for number, (name, *rest) in enumerate(COMMANDS):
        out = tmp_path / f"out-{number}"
        arguments = [{"GOOD": str(good), "OUT": str(out)}.get(each, each) for each in rest]
        code = main([name, str(path), *arguments])
        told = capsys.readouterr()
        assert code in (0, 1, 2), (name, code)
        if code == 2:
            assert told.err.startswith("vnext-replay: ") and told.err.strip().count("\n") == 0, told.err
        assert "Traceback" not in told.out + told.err and "\x1b[31m" not in told.out + told.err
        codes.append(code)
    return codes


def with_nasty_times(data: bytes, chance: random.Random) -> bytes:
    """A file of stamps: noise, cut, flipped, or numbers that cannot be behind a right checksum; or as it was."""
    place = chance.randrange(len(data))
    big = [chance.choice((0, 1, 2**31, 2**53 - 1, 2**53, 2**64 - 1)) for _ in range(8)]
    records = struct.pack("<3Q", *big[:3])
    block = stamps.block_head.pack(chance.choice((3, 2, 2**32 - 1)), -(2**63), *big[3:6]) + records
    return chance.choice((
        data, data, chance.randbytes(chance.randint(0, 400)), data[:place], stamps.BLOCK_MAGIC + data[8:][:place],
        stamps.block_start.pack(stamps.BLOCK_MAGIC, checksum(block)) + block,
        stamps.head.pack(stamps.MAGIC, *big[:2]) + struct.pack("<6Q", *big[:6]),
        data + stamps.block_start.pack(stamps.BLOCK_MAGIC, checksum(block)) + block,
    ))  # fmt: skip


def replaced(value: object, chance: random.Random) -> object:
    """A decoded value with one part, anywhere in it, exchanged for something nasty."""
    if isinstance(value, list) and value and chance.random() < 0.9:
        place = chance.randrange(len(value))
        return [*value[:place], replaced(value[place], chance), *value[place + 1 :]]
    if isinstance(value, dict) and value and chance.random() < 0.95:
        name = chance.choice(sorted(value))
        return {**value, name: replaced(value[name], chance)}
    if isinstance(value, bytes) and value and chance.random() < 0.5:
        place = chance.randrange(len(value))
        return value[:place] + bytes([chance.randrange(256)]) + value[place + 1 :]
    return chance.choice(NASTY)


def with_nasty_parts(data: bytes, chance: random.Random, place: int) -> bytes:
    """A segment in which the record number `place` (0 is the header) has a nasty part and a right checksum."""
    at, number, out = len(logs.MAGIC), 0, bytearray(data[: len(logs.MAGIC)])
    while (end := record_end(data, at)) > 0:
        payload = data[at + RECORD_HEAD : end]
        if number == place:
            head = payload[:8] if number else b""
            body = msgspec.msgpack.decode(payload[len(head) :])
            if not number and chance.random() < 0.4 and body[9]:
                kept = msgspec.msgpack.decode(body[9])
                body[9] = msgspec.msgpack.encode(replaced(kept, chance))
            else:
                body = replaced(body, chance)
            payload = head + msgspec.msgpack.encode(body)
        out += logs.seal(payload)
        at, number = end, number + 1
    return bytes(out)


@pytest.mark.parametrize("seed", range(20))
def test_nasty_values_behind_right_checksums(tmp_path, capsys, good, seed):
    chance = random.Random(seed)
    paths = sorted(good.glob("*.vnextlog"))
    bad = tmp_path / "bad"
    bad.mkdir()
    victim = chance.randrange(len(paths))
    for number, path in enumerate(paths):
        data = path.read_bytes()
        if number == victim:
            frames = len(list(read([data]))) - 2
            data = with_nasty_parts(data, chance, chance.choice((0, 0, chance.randint(1, frames))))
        (bad / path.name).write_bytes(data)
        times = stamps.stamps_name(path.name)
        (bad / times).write_bytes(with_nasty_times((good / times).read_bytes(), chance))
    target = bad if chance.random() < 0.7 else bad / paths[victim].name
    run_all(capsys, target, good, tmp_path)


@pytest.mark.parametrize("seed", range(6))
def test_random_bytes(tmp_path, capsys, good, seed):
    """Noise, noise behind a magic, noise behind a right header, a good log with flipped bytes, plain and packed."""
    chance = random.Random(seed)
    noise = chance.randbytes(chance.randint(0, 4000))
    data = sorted(good.glob("*.vnextlog"))[0].read_bytes()
    header = data[: record_end(data, len(logs.MAGIC))]
    flipped = bytearray(data)
    for _ in range(5):
        flipped[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
    block = pack_block(data)
    squeezed = head_of(len(data), [len(block)]) + block[: len(block) // 2] + noise
    for number, bad in enumerate((noise, logs.MAGIC + noise, MAGIC + noise, header + noise, bytes(flipped), squeezed)):
        path = tmp_path / f"bad-{number}.vnextlog"
        path.write_bytes(bad)
        codes = run_all(capsys, path, good, tmp_path / f"{number}")
        assert number > 2 or set(codes) == {2}


@pytest.mark.parametrize("command", ["info", "verify", "show", "stat", "diff", "ranks", "trace", "watch", "shrink"])
def test_a_length_in_a_file_reserves_no_memory(tmp_path, good, command):
    """Records and values that say they are gigabytes long: what is taken stays within twice the file and a little."""
    data = sorted(good.glob("*.vnextlog"))[0].read_bytes()
    header = data[: record_end(data, len(logs.MAGIC))]
    huge = b"\xdd\xff\xff\xff\xff"
    for number, bad in enumerate((
        logs.MAGIC + struct.pack("<II", 2**32 - 1, 0) + b"\0" * 2**20,
        header + struct.pack("<II", 2**32 - 1, 0) + b"\1" * 2**20,
        header + logs.seal(b"\0" * 8 + b"\x95\x01" + huge) * 2000,
        header + logs.seal(b"\0" * 8 + b"\x95\x01\x91\x94\x03" + huge + b"\0" * 2**20),
        header + b"\0" * 2**20,
    )):  # fmt: skip
        path = tmp_path / f"{command}-{number}.vnextlog"
        path.write_bytes(bad)
        out = ["-o", tmp_path / f"out-{number}"]
        more = {"diff": [good], "trace": out, "shrink": out, "watch": ["--once"]}
        arguments = [command, str(path), *map(str, more.get(command, ()))]
        main(arguments)
        cache_path(path).unlink(missing_ok=True)
        tracemalloc.start()
        try:
            assert main(arguments) in (0, 1, 2)
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        assert peak < 2 * len(bad) + SLACK, (number, peak, len(bad))


def test_a_state_of_any_size_is_not_believed(tmp_path, good):
    """Blocks by the billion in a header of a few bytes."""
    for config, sentence in (
        (small_config(block_count=2**40), "no engine has more than"),
        (small_config(block_count=2**63), "no engine has more than"),
        (small_config(model_len_max=2**62), ""),
    ):
        header = open_log(good).header
        changed = msgspec.structs.replace(header, started=msgspec.structs.replace(header.started, config=config))
        path = tmp_path / "big.vnextlog"
        path.write_bytes(logs.open_segment(changed)[0])
        program = (
            "import resource, sys; from vnext.replay.cli import main; before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss;"
            "code = main(['verify', sys.argv[1]]); after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss;"
            "assert after - before < 64 << 10, after - before; sys.exit(code)"
        )
        done = subprocess.run([sys.executable, "-c", program, str(path)], cwd=Path(__file__).parents[2], capture_output=True, text=True)
        assert done.returncode == (2 if sentence else 0) and sentence in done.stderr.replace("\n", " "), done.stderr


def test_a_name_in_a_log_runs_nothing(tmp_path, good, monkeypatch):
    """A policy that a log names is imported by nobody who was not asked to."""
    (tmp_path / "trap.py").write_text("raise SystemExit('the trap was sprung')\n")
    monkeypatch.syspath_prepend(tmp_path)
    config = small_config(policy="trap:key")
    header = open_log(good).header
    changed = msgspec.structs.replace(header, started=msgspec.structs.replace(header.started, config=config))
    data = sorted(good.glob("*.vnextlog"))[0].read_bytes()
    log_dir = tmp_path / "log"
    log_dir.mkdir()
    frames = data[record_end(data, len(logs.MAGIC)) :]
    (log_dir / logs.segment_name(0)).write_bytes(logs.open_segment(changed)[0] + frames)
    for name, *rest in COMMANDS:
        out = tmp_path / f"out-{name}-{len(rest)}-{rest[-1] if rest else ''}".replace("OUT", rest[1] if len(rest) > 2 else "")
        arguments = [{"GOOD": str(good), "OUT": str(out)}.get(each, each) for each in rest]
        assert main([name, str(log_dir), *arguments]) in (0, 1, 2)
    walk = Walk(Index(open_log(log_dir)))
    for moment in walk.moments(walk.first_step, walk.last_step + 1):
        step_view(moment)
    assert "trap" not in sys.modules
    with pytest.raises(SystemExit, match="sprung"):
        main(["verify", str(log_dir), "--own-policy"])


def test_one_sentence_is_one(tmp_path, good):
    with pytest.raises(UnusableLog) as found:
        open_log(tmp_path / "absent")
    assert "\n" not in str(found.value)
