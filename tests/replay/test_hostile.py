"""Logs that mean harm: random bytes, huge lengths, wrong types and numbers behind right checksums.

Nothing in a file makes the tool raise, run code or take much more memory than the file: it answers, or says one sentence.
"""

from __future__ import annotations

import json
import random
import struct
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from log_drive import record, small_config

from vnext.log import codec, timestamps
from vnext.log.compression import MAGIC, compress_block, head_of
from vnext.log.log_plain import RECORD_HEAD, checksum, record_end
from vnext.log.reading import read
from vnext.replay.cli.main import main
from vnext.replay.reading.index import Index
from vnext.replay.reading.source import UnusableLog, open_log
from vnext.replay.ui.app import step_view
from vnext.replay.ui.walk import Walk

COMMANDS = (
    ("info",),
    ("verify",),
    ("verify", "--laws"),
    ("show",),
    ("show", "7"),
    ("req", "3"),
    ("stat",),
    ("ranks",),
    ("slow",),
    ("cache",),
    ("diff", "GOOD"),
    ("cut", "2", "9", "-o", "OUT"),
    ("redact", "-o", "OUT"),
    ("merge", "GOOD", "-o", "OUT"),
    ("convert", "--to", "jsonl", "-o", "OUT"),
    ("convert", "--to", "mooncake", "-o", "OUT"),
    ("convert", "--to", "vllm-vcr", "-o", "OUT"),
    ("trace", "-o", "OUT"),
    ("what-if", "--set", "max_num_seqs=3"),
    ("shrink", "-o", "OUT"),
    ("to-test", "-o", "OUT"),
    ("fork", "5", "--forks", "2", "--steps", "30"),
    ("watch", "--once", "--whole"),
    ("watch", "--once", "--laws"),
)
NASTY = (
    -1, 0, 1, 2**31, 2**32, 2**62, 2**63 - 1, 2**63, 2**64 - 1, -(2**63), 1e308, float("nan"), float("inf"), "", "x" * 3000,
    "os:system", "\x1b[31m\n", b"", b"\xff" * 41, b"\0" * 4096, [], [[]], [0] * 300, {}, None, True,
)  # fmt: skip

SLACK = 3 * 2**19
"""What the tool itself takes for a file of any size: its parser, its tables."""


@pytest.fixture(scope="module")
def good(tmp_path_factory) -> Path:
    """A log of several segments."""
    log_dir, config = tmp_path_factory.mktemp("good") / "log", small_config(page_count=18)
    record(log_dir, "full", config, arrivals=26, size=1200, timestamped=True)
    assert len(list(log_dir.glob("*.vnextlog"))) > 2
    return log_dir


def run_all(capsys, path: Path, good: Path, tmp_path: Path) -> list[int]:
    """Every command on a log: its exit codes. One sentence where there is nothing to work with."""
    codes = []
    for number, (name, *rest) in enumerate(COMMANDS):
        out = tmp_path / f"out-{number}"
        arguments = [{"GOOD": str(good), "OUT": str(out)}.get(each, each) for each in rest]
        code = main([name, str(path), *arguments])
        reported = capsys.readouterr()
        assert code in (0, 1, 2), (name, code)
        if code == 2:
            assert reported.err.startswith("vnext-replay: ") and reported.err.strip().count("\n") == 0, reported.err
        assert "Traceback" not in reported.out + reported.err and "\x1b[31m" not in reported.out + reported.err
        codes.append(code)
    return codes


def with_nasty_times(data: bytes, rng: random.Random) -> bytes:
    """A file of stamps: noise, cut, flipped, or numbers that cannot be behind a right checksum; or as it was."""
    place = rng.randrange(len(data))
    big = [rng.choice((0, 1, 2**31, 2**53 - 1, 2**53, 2**64 - 1)) for _ in range(8)]
    records = struct.pack("<3Q", *big[:3])
    block = timestamps.block_head.pack(rng.choice((3, 2, 2**32 - 1)), -(2**63), *big[3:6]) + records
    return rng.choice((
        data, data, rng.randbytes(rng.randint(0, 400)), data[:place], timestamps.BLOCK_MAGIC + data[8:][:place],
        timestamps.block_start.pack(timestamps.BLOCK_MAGIC, checksum(block)) + block,
        timestamps.head.pack(timestamps.MAGIC, *big[:2]) + struct.pack("<6Q", *big[:6]),
        data + timestamps.block_start.pack(timestamps.BLOCK_MAGIC, checksum(block)) + block,
    ))  # fmt: skip


def replaced(value: object, rng: random.Random) -> object:
    """A decoded value with one part, anywhere in it, exchanged for something nasty."""
    if isinstance(value, list) and value and rng.random() < 0.9:
        place = rng.randrange(len(value))
        return [*value[:place], replaced(value[place], rng), *value[place + 1 :]]
    if isinstance(value, dict) and value and rng.random() < 0.95:
        name = rng.choice(sorted(value))
        return {**value, name: replaced(value[name], rng)}
    if isinstance(value, bytes) and value and rng.random() < 0.5:
        place = rng.randrange(len(value))
        return value[:place] + bytes([rng.randrange(256)]) + value[place + 1 :]
    return rng.choice(NASTY)


def with_nasty_parts(data: bytes, rng: random.Random, place: int) -> bytes:
    """A segment in which the record number `place` (0 is the header) has a nasty part and a right checksum."""
    at, number, out = len(codec.MAGIC), 0, bytearray(data[: len(codec.MAGIC)])
    while (end := record_end(data, at)) > 0:
        payload = data[at + RECORD_HEAD : end]
        if number == place:
            head = payload[:8] if number else b""
            body = msgspec.msgpack.decode(payload[len(head) :])
            if not number and rng.random() < 0.4 and body[9]:
                kept = msgspec.msgpack.decode(body[9])
                body[9] = msgspec.msgpack.encode(replaced(kept, rng))
            else:
                body = replaced(body, rng)
            payload = head + msgspec.msgpack.encode(body)
        out += codec.seal(payload)
        at, number = end, number + 1
    return bytes(out)


@pytest.mark.parametrize("seed", range(20))
def test_nasty_values_behind_right_checksums(tmp_path, capsys, good, seed):
    rng = random.Random(seed)
    paths = sorted(good.glob("*.vnextlog"))
    bad = tmp_path / "bad"
    bad.mkdir()
    victim = rng.randrange(len(paths))
    for number, path in enumerate(paths):
        data = path.read_bytes()
        if number == victim:
            frames = len(list(read([data]))) - 2
            data = with_nasty_parts(data, rng, rng.choice((0, 0, rng.randint(1, frames))))
        (bad / path.name).write_bytes(data)
        times = timestamps.timestamps_name(path.name)
        (bad / times).write_bytes(with_nasty_times((good / times).read_bytes(), rng))
    target = bad if rng.random() < 0.7 else bad / paths[victim].name
    run_all(capsys, target, good, tmp_path)


@pytest.mark.parametrize("seed", range(6))
def test_random_bytes(tmp_path, capsys, good, seed):
    """Noise, noise behind a magic, noise behind a right header, a good log with flipped bytes, plain and packed."""
    rng = random.Random(seed)
    noise = rng.randbytes(rng.randint(0, 4000))
    data = sorted(good.glob("*.vnextlog"))[0].read_bytes()
    header = data[: record_end(data, len(codec.MAGIC))]
    flipped = bytearray(data)
    for _ in range(5):
        flipped[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    block = compress_block(data)
    squeezed = head_of(len(data), [len(block)]) + block[: len(block) // 2] + noise
    for number, bad in enumerate((noise, codec.MAGIC + noise, MAGIC + noise, header + noise, bytes(flipped), squeezed)):
        path = tmp_path / f"bad-{number}.vnextlog"
        path.write_bytes(bad)
        codes = run_all(capsys, path, good, tmp_path / f"{number}")
        assert number > 2 or set(codes) == {2}


PEAKS = f"""
import json, sys, tracemalloc
from pathlib import Path
from vnext.replay.reading.cachefile import cache_path
from vnext.replay.cli.main import main
for path, arguments in json.loads(sys.argv[1]):
    main(arguments)
    cache_path(Path(path)).unlink(missing_ok=True)
    tracemalloc.start()
    assert main(arguments) in (0, 1, 2)
    peak, size = tracemalloc.get_traced_memory()[1], Path(path).stat().st_size
    tracemalloc.stop()
    assert peak < 2 * size + {SLACK}, (path, peak, size)
"""


@pytest.mark.parametrize("command", ["info", "verify", "show", "stat", "diff", "ranks", "trace", "watch", "shrink"])
def test_a_length_in_a_file_reserves_no_memory(tmp_path, good, command):
    """Records and values that say they are gigabytes long: what is taken stays within twice the file and a little.

    In a process of its own: the threads of other tests would count."""
    data = sorted(good.glob("*.vnextlog"))[0].read_bytes()
    header = data[: record_end(data, len(codec.MAGIC))]
    huge, runs = b"\xdd\xff\xff\xff\xff", []
    for number, bad in enumerate((
        codec.MAGIC + struct.pack("<II", 2**32 - 1, 0) + b"\0" * 2**20,
        header + struct.pack("<II", 2**32 - 1, 0) + b"\1" * 2**20,
        header + codec.seal(b"\0" * 8 + b"\x95\x01" + huge) * 2000,
        header + codec.seal(b"\0" * 8 + b"\x95\x01\x91\x94\x03" + huge + b"\0" * 2**20),
        header + b"\0" * 2**20,
    )):  # fmt: skip
        path = tmp_path / f"{command}-{number}.vnextlog"
        path.write_bytes(bad)
        out = ["-o", str(tmp_path / f"out-{number}")]
        more = {"diff": [str(good)], "trace": out, "shrink": out, "watch": ["--once"]}
        runs.append((str(path), [command, str(path), *more.get(command, ())]))
    program = [sys.executable, "-c", PEAKS, json.dumps(runs)]
    done = subprocess.run(program, cwd=Path(__file__).parents[2], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_state_of_any_size_is_not_believed(tmp_path, good):
    """Blocks by the billion in a header of a few bytes."""
    for config, sentence in (
        (small_config(page_count=2**40), "no engine has more than"),
        (small_config(page_count=2**63), "no engine has more than"),
        (small_config(max_model_len=2**62), ""),
    ):
        header = open_log(good).header
        changed = msgspec.structs.replace(header, started=msgspec.structs.replace(header.started, config=config))
        path = tmp_path / "big.vnextlog"
        path.write_bytes(codec.open_segment(changed)[0])
        program = (
            "import resource, sys; from vnext.replay.cli.main import main; before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss;"
            "code = main(['verify', sys.argv[1]]); after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss;"
            "assert after - before < 64 << 10, after - before; sys.exit(code)"
        )
        done = subprocess.run(
            [sys.executable, "-c", program, str(path)], cwd=Path(__file__).parents[2], capture_output=True, text=True
        )
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
    frames = data[record_end(data, len(codec.MAGIC)) :]
    (log_dir / codec.segment_name(0)).write_bytes(codec.open_segment(changed)[0] + frames)
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
