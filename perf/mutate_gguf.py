"""Change the headers of GGUF files at random and read what comes out: `python -m perf.mutate_gguf FILE ... --count 100000`.

Each mutation must load, or be refused with one sentence, within `--seconds` of the processor and MEMORY_BYTES_MAX, whatever it says. A header is
that of the file with TOKENS_KEPT tokens and LAYERS_KEPT layers, since a reading takes a hundredth of the time then; `--whole` keeps
all. Bits flip, numbers, counts, lengths, kinds and offsets become hostile ones, members and tensors swap, are doubled or go, texts
become others, the file ends early, or gigabytes of zeros follow it. The weights are zeros, in a sparse file.

Reading is all that a start does before the first step: header, JSON files, configuration, tokenizer, template and weights. Workers
are forked; a number names a mutation (`--first N --count 1` repeats it). Exits with status 1 if one failed.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import random
import resource
import shutil
import signal
import struct
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from perf.record import record_of, write_record
from vnext.commands.machine import machine
from vnext.kernels.arrays import host_dtype
from vnext.kernels.format import weight_formats
from vnext.models.config.folder import require_checkpoint
from vnext.models.config.model_config import load_config
from vnext.models.errors import ModelError
from vnext.models.gguf.header import ARRAY, SCALARS, STRING, Header, read_header, sizes
from vnext.models.layers.sharding import alone
from vnext.models.loading.overlay import gguf_folder
from vnext.models.loading.weights import choose_numbers, load_params
from vnext.runtime.rank.loading import start_threads
from vnext.text.files import CheckpointUnreadable
from vnext.text.tokenizer import Tokenizer

TOKENS_KEPT, LAYERS_KEPT = 600, 1
MEMORY_BYTES_MAX = 2**30
SPARSE_BYTES = 2**32
"""Of a file that claims gigabytes."""
HOSTILE = (
    0, 1, 2, 7, 31, 255, 2**14, 2**15, 2**16 - 1, 2**20, 2**31 - 1, 2**31, 2**32 - 1, 2**33, 2**40, 2**53, 2**62, 2**63 - 1, 2**63,
    2**64 - 1,
)  # fmt: skip
TEXTS = (
    b"", b"\0", b"\xff\xfe", b"llama", b"gemma3", b"qwen3moe", b"qwen2", b"gpt2", b"bert", b"../../x", b"a" * 4096,
    b"{% for i in", b"{{ 1/0 }}", b"\xed\xa0\x80", "\u2581".encode(), b"<0x00>", b"smollm", b"llama-bpe", b"linear", b"yarn", b"token_embd.weight", b"[" * 5000,
)  # fmt: skip
NAMES = ("attention.head_count", "attention.key_length", "block_count", "expert_count", "rope.scaling.type", "rope.scaling.factor")


class Field(NamedTuple):
    """A place in a header: `what` stands there, as SCALARS has it for a number."""

    what: str
    start: int
    size: int


class Written:
    """A header as it is written, which notes its fields and where each member and tensor lies. Mutable."""

    def __init__(self) -> None:
        self.data, self.fields, self.entries = bytearray(), list[Field](), list[tuple[int, int]]()

    def number(self, code: str, value: Any, what: str = "") -> None:
        packed = struct.pack("<" + code, value)
        self.fields.append(Field(what or code, len(self.data), len(packed)))
        self.data += packed

    def text(self, value: str) -> None:
        data = value.encode()
        self.number("Q", len(data), "length")
        self.fields.append(Field("text", len(self.data), len(data)))
        self.data += data

    def value(self, value: Any) -> None:
        kind = kind_of(value)
        self.number("I", kind, "kind")
        if kind == STRING:
            return self.text(value)
        if kind != ARRAY:
            return self.number(SCALARS[kind], value)
        of = kind_of(value[0])
        self.number("I", of, "kind")
        self.number("Q", len(value), "count")
        if of == STRING:
            for each in value:
                self.text(each)
        else:
            self.data += struct.pack(f"<{len(value)}{SCALARS[of]}", *value)


class Model(NamedTuple):
    """A header to change, and the size of its file."""

    name: str
    data: bytes
    fields: tuple[Field, ...]
    entries: tuple[tuple[int, int], ...]
    size_bytes: int


def kind_of(value: Any) -> int:
    if isinstance(value, str):
        return STRING
    if isinstance(value, bool):
        return 7
    if isinstance(value, int):
        return 4 if value >= 0 else 5
    return 6 if isinstance(value, float) else ARRAY


def model_of(file: Path, whole: bool) -> Model:
    """The header of a file, written again. Its data is zeros."""
    header = read_header(file)
    metadata, shapes = dict(header.metadata), {name: tensor.shape for name, tensor in header.tensors.items()}
    if not whole:
        metadata, shapes = cut(header)
    types = {name: number for number, (name, *_) in sizes().items()}
    written = Written()
    written.data += b"GGUF"
    written.number("I", 3)
    written.number("Q", len(shapes), "count")
    written.number("Q", len(metadata), "count")
    for name, value in metadata.items():
        start = len(written.data)
        written.text(name)
        written.value(value)
        written.entries.append((start, len(written.data)))
    offset = 0
    for name, shape in shapes.items():
        tensor, start = header.tensors[name], len(written.data)
        written.text(name)
        written.number("I", len(shape), "dimensions")
        for size in reversed(shape):
            written.number("Q", size, "size")
        written.number("I", types[tensor.type], "type")
        written.number("Q", offset, "offset")
        written.entries.append((start, len(written.data)))
        _, block, block_bytes = sizes()[types[tensor.type]]
        offset += -(-int(np.prod(shape)) // block * block_bytes // 32) * 32
    return Model(file.name, bytes(written.data), (*written.fields,), (*written.entries,), len(written.data) + 64 + offset)


def cut(header: Header) -> tuple[dict[str, Any], dict[str, tuple[int, ...]]]:
    """Metadata and shapes with few tokens and layers."""
    count = len(header.metadata["tokenizer.ggml.tokens"])
    kept = set(header.metadata["tokenizer.ggml.tokens"][:TOKENS_KEPT])
    metadata: dict[str, Any] = {}
    for name, value in header.metadata.items():
        if name.endswith(".block_count"):
            value = LAYERS_KEPT
        elif name.endswith(".merges"):
            value = [merge for merge in value if {merge.replace(" ", ""), *merge.split(" ")} <= kept]
        elif not isinstance(value, str) and hasattr(value, "__len__") and len(value) == count:
            value = value[:TOKENS_KEPT]
        metadata[name] = TOKENS_KEPT if name.endswith(".vocab_size") else value
    shapes = {
        name: tuple(TOKENS_KEPT if size == count else size for size in tensor.shape)
        for name, tensor in header.tensors.items()
        if not name.startswith("blk.") or int(name.split(".")[1]) < LAYERS_KEPT
    }
    return metadata, shapes


# ---- mutations ---------------------------------------------------------------------------------------------------


class Mutation(NamedTuple):
    """The file that comes out: its first bytes, its size, and what was done."""

    data: bytes
    size_bytes: int
    done: str


def mutation(models: list[Model], number: int) -> Mutation:
    rng = random.Random(number)
    model = models[number % len(models)]
    data, size, done = bytearray(model.data), model.size_bytes, [model.name]
    for _ in range(rng.choice((1, 1, 1, 2, 2, 4, 8))):
        way = rng.choices(list(WAYS), [weight for weight in WAYS.values()])[0]
        done.append(way(rng, model, data))
    if rng.random() < 0.05:
        size = rng.choice((0, 3, rng.randrange(len(data)), rng.randrange(size), size - 1, SPARSE_BYTES))
        done.append(f"{size} bytes")
    return Mutation(bytes(data), size, ", ".join(done))


def flip(rng: random.Random, model: Model, data: bytearray) -> str:
    place = rng.randrange(len(data))
    data[place] ^= 1 << rng.randrange(8)
    return f"a bit at {place}"


def set_number(rng: random.Random, model: Model, data: bytearray) -> str:
    """A number, count, length, size, type, kind or offset becomes another."""
    fields = [each for each in model.fields if each.what != "text"]
    what = rng.choice(sorted({each.what for each in fields}))  # else nearly all would be lengths of tokens
    field = rng.choice([each for each in fields if each.what == what])
    value = rng.choice((*HOSTILE, rng.getrandbits(8), rng.getrandbits(16), rng.getrandbits(32), rng.getrandbits(64)))
    own = int.from_bytes(data[field.start : field.start + field.size], "little")
    value = rng.choice((value, own + rng.choice((-32, -1, 1, 2, 32))))
    data[field.start : field.start + field.size] = (value % 256**field.size).to_bytes(field.size, "little")
    return f"{field.what} at {field.start} is {value}"


def set_float(rng: random.Random, model: Model, data: bytearray) -> str:
    field = rng.choice([each for each in model.fields if each.what == "f"])
    value = rng.choice((float("nan"), float("inf"), float("-inf"), 0.0, -1.0, 1e-45, 3e38, 1e5))
    struct.pack_into("<f", data, min(field.start, len(data) - 4), value)
    return f"a float at {field.start} is {value}"


def set_text(rng: random.Random, model: Model, data: bytearray) -> str:
    """A text becomes another, with its length; what follows moves."""
    fields = [each for each in model.fields if each.what == "text"]
    field = rng.choice(fields[:: max(1, len(fields) // 200)] + fields[:40])
    text = rng.choice((*TEXTS, model.name.encode(), *(f"llama.{each}".encode() for each in NAMES)))
    data[field.start - 8 : field.start + field.size] = struct.pack("<Q", len(text)) + text
    return f"the text at {field.start} is {text[:20]!r}"


def set_kind(rng: random.Random, model: Model, data: bytearray) -> str:
    """A member's value is of another kind."""
    field = rng.choice([each for each in model.fields if each.what == "kind"])
    value = rng.choice((*SCALARS, STRING, ARRAY, 13))
    data[field.start : field.start + 4] = struct.pack("<I", value)
    return f"the kind at {field.start} is {value}"


def move_entry(rng: random.Random, model: Model, data: bytearray) -> str:
    """A member or tensor is doubled, goes, or takes another's place."""
    (start, stop), (other, end) = rng.sample(model.entries, 2)
    entry = bytes(data[start:stop])
    data[other:end] = rng.choice((entry, entry + bytes(data[other:end]), b""))
    return f"the entry at {start} over {other}"


def move_bytes(rng: random.Random, model: Model, data: bytearray) -> str:
    place = rng.randrange(len(data))
    data[place : place + rng.choice((0, 1, 4, 8))] = rng.choice((b"", b"\0" * 4, b"\xff" * 8, rng.randbytes(rng.randrange(1, 64))))
    return f"bytes at {place}"


WAYS: dict[Callable[[random.Random, Model, bytearray], str], int] = {
    flip: 4, set_number: 12, set_float: 2, set_text: 4, set_kind: 2, move_entry: 2, move_bytes: 2,
}  # fmt: skip


# ---- reading -----------------------------------------------------------------------------------------------------


def read(file: Path, folders: Path) -> None:
    """All that a start reads of a file. Raises ModelError and CheckpointUnreadable."""
    folder = gguf_folder(file, folders)
    require_checkpoint(folder)
    config = load_config(folder)
    tokenizer = Tokenizer.load(folder)
    tokenizer.decode(tokenizer.encode("Größe 12 \U0001f642\n"))
    dtype, quantization = choose_numbers("auto", config, "auto", "cpu")
    load_params(folder, config, alone(), host_dtype(dtype), "cpu", formats=weight_formats(quantization))


def judged(made: Mutation, folder: Path, seconds_max: float = 5.0) -> str:
    """How a mutation was read: "loaded", "refused", or why that is wrong."""
    file, folders = folder / "m.gguf", folder / "folders"
    with file.open("wb") as stream:
        stream.write(made.data[: made.size_bytes])
        stream.truncate(made.size_bytes)
    signal.setitimer(signal.ITIMER_PROF, seconds_max)
    try:
        read(file, folders)
        return "loaded"
    except (ModelError, CheckpointUnreadable) as error:
        sentence = str(error)
        return "refused" if sentence and "\n" not in sentence and len(sentence) < 1000 else f"refused with {sentence[:1200]!r}"
    except Exception:  # whatever comes is a finding
        return traceback.format_exc()
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        shutil.rmtree(folders, ignore_errors=True)


def work(models: list[Model], numbers: range, seconds_max: float, out: Connection) -> None:
    """Read the mutations of these numbers, and report (number, verdict, seconds) of each, before each (number, "", 0)."""
    start_threads(1)
    signal.signal(signal.SIGPROF, on_alarm)
    with tempfile.TemporaryDirectory() as folder:
        judged(Mutation(models[0].data, models[0].size_bytes, ""), Path(folder), seconds_max)  # what is imported late
        resource.setrlimit(resource.RLIMIT_AS, (size := virtual_bytes() + MEMORY_BYTES_MAX + 4 * SPARSE_BYTES, size))
        before = peak_bytes()
        for number in numbers:
            out.send((number, "", 0.0))
            made, begun_s = mutation(models, number), time.process_time()
            verdict = judged(made, Path(folder), seconds_max)
            out.send((number, verdict, time.process_time() - begun_s))
            if (used := peak_bytes()) > before + MEMORY_BYTES_MAX:
                out.send((number, f"it took {used - before} bytes", 0.0))
    out.send((-1, "", float(peak_bytes())))


def on_alarm(number: int, frame: Any) -> None:
    raise TimeoutError("it takes more than --seconds")


def peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def virtual_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")


# ---- the run -----------------------------------------------------------------------------------------------------


class Run:
    """The verdicts so far. Mutable."""

    def __init__(self, models: list[Model], seconds_max: float) -> None:
        self.models, self._seconds_max = models, seconds_max
        self.verdicts, self.failed, self.longest_s, self.memory_bytes = Counter[str](), list[int](), 0.0, 0.0

    def over(self, numbers: range) -> None:
        """Read the mutations of these numbers in a worker; after one that ends it, in another."""
        while numbers:
            ours, theirs = multiprocessing.Pipe(duplex=False)
            worker = multiprocessing.get_context("fork").Process(target=work, args=(self.models, numbers, self._seconds_max, theirs))
            worker.start()
            theirs.close()
            last = self.heard(ours)
            worker.join()
            if last is None:
                return
            self.take(last, f"the worker ended with {worker.exitcode}", 0.0)
            numbers = range(last + 1, numbers.stop)

    def heard(self, pipe: Connection) -> int | None:
        """Take verdicts until the worker's end; returns the number at which it ended too early."""
        begun = -1
        try:
            while True:
                number, verdict, figure = pipe.recv()
                if number < 0:
                    self.memory_bytes = max(self.memory_bytes, figure)
                    return None
                begun = number
                if verdict:
                    self.take(number, verdict, figure)
        except EOFError:
            return begun

    def take(self, number: int, verdict: str, seconds: float) -> None:
        self.longest_s = max(self.longest_s, seconds)
        if verdict in ("loaded", "refused"):
            self.verdicts[verdict] += 1
            return
        self.verdicts["failed"] += 1
        self.failed.append(number)
        print(f"\n{number}: {mutation(self.models, number).done}\n{verdict}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--whole", action="store_true", help="keep the whole vocabulary and all layers")
    parser.add_argument("--seconds", type=float, default=5.0, help="of the processor that one may take")
    parser.add_argument("--json", type=Path, help="record to write")
    options = parser.parse_args()
    before = machine()
    run = Run([model_of(file, options.whole) for file in options.files], options.seconds)
    begun_s, step = time.monotonic(), 2000
    for first in range(options.first, options.first + options.count, step):
        run.over(range(first, min(first + step, options.first + options.count)))
        print(f"{first}: {dict(run.verdicts)}, longest {run.longest_s:.1f} s, {run.memory_bytes / 2**20:.0f} MiB", flush=True)
    measured = {
        "files": [model.name for model in run.models], "header_bytes": [len(model.data) for model in run.models],
        "first": options.first, **run.verdicts, "longest_s": round(run.longest_s, 2),
        "memory_bytes_max": int(run.memory_bytes), "seconds": round(time.monotonic() - begun_s),
    }  # fmt: skip
    write_record(options.json, record_of(" ".join(["python -m perf.mutate_gguf", *sys.argv[1:]]), before, measured))
    return int(bool(run.failed))


if __name__ == "__main__":
    sys.exit(main())
