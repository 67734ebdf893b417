"""Quality of quantised weights beside llama.cpp's on the same file and text: `python -m perf.perplexity --json FILE`.

A text is cut into windows of WINDOW tokens. Every engine computes each window as one prompt, and each token is scored after those before
it. Divergence is that of an engine's distribution from the one of the same file's weights in float32 arithmetic
(Kullback-Leibler, in nats a token). Own schemes round the float32 numbers of SmolLM2's Q4_1 file, which is what there is of it. Needs
the environment of `perf/peers/setup.sh llamacpp`; `PEERS` names its folder, where the files of models lie too. With --written both
engines score the GGUF files that `vnext quantize` writes of a file's numbers in these schemes, and nothing else is scored.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from tokenizers import Tokenizer

from perf.peers.files import gguf_file
from perf.record import parser_of, record_of, write_record
from vnext.commands.machine import machine
from vnext.models.loading.gguf_out import GgufQuantiser
from vnext.models.loading.overlay import gguf_folder
from vnext.models.loading.quantise import Quantiser
from vnext.options.reader import GGUF_SCHEMES

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT / "tests" / "models"))

from model_helpers import Chunk, load_model  # noqa: E402

SCORER = ROOT / "perf" / "peers" / "score_llamacpp.py"
WINDOW, BLOCK = 512, 16
TEXTS = ("a-step.md", "design.md", "operations.md")
"""Of docs/: prose about a program that no model has met."""
SMOLLM2, GEMMA = "smollm2-gguf", "gemma3-gguf"
OWN = ("int8", "int4")
WRITTEN = ("fp8", "w8a16", "w4a16")


class Score(NamedTuple):
    """Of all tokens: perplexity; mean divergence from the reference, nats; share whose likeliest token is the reference's."""

    perplexity: float
    divergence: float
    same_likeliest: float


class Setting(NamedTuple):
    """A model as vnext loads it."""

    folder: Path
    dtype: torch.dtype = torch.bfloat16
    quantization: str = "codes"

    def logits(self, windows: np.ndarray) -> Iterator[torch.Tensor]:
        """Float32 [w, vocabulary] of each window."""
        model = load_model(self.folder, dtype=self.dtype, quantization=self.quantization)
        for tokens in windows:
            yield model.logits(Chunk(tokens.tolist(), 0, range(1, WINDOW // BLOCK + 1))).float()


class LlamaCpp(NamedTuple):
    """A file as llama.cpp loads it."""

    file: Path
    python: Path

    def logits(self, windows: np.ndarray) -> Iterator[torch.Tensor]:
        """Float32 [w, vocabulary] of each window."""
        with tempfile.TemporaryDirectory() as work:
            tokens, out = Path(work) / "tokens.npy", Path(work) / "logits.npy"
            np.save(tokens, windows)
            self._run(self.file, tokens, out)
            yield from (torch.tensor(window) for window in np.load(out, mmap_mode="r"))

    def converted(self, kind: str, out: Path) -> Path:
        """The file with its matrices as another type."""
        self._run(self.file, kind, out)
        return out

    def _run(self, *arguments: object) -> None:
        subprocess.run([self.python, SCORER, *map(str, arguments)], check=True, stderr=subprocess.DEVNULL)


class Reference:
    """The distributions of float32 arithmetic, in files."""

    def __init__(self, setting: Setting, windows: np.ndarray, work: Path) -> None:
        self._windows = windows
        self._kept = [work / f"reference-{number}.npy" for number in range(len(windows))]
        for path, logits in zip(self._kept, setting.logits(windows), strict=True):
            np.save(path, logits.log_softmax(-1).numpy())

    def score(self, engine: Setting | LlamaCpp | None) -> Score:
        """Of an engine; of the reference itself for None."""
        lost, divergence, same = 0.0, 0.0, 0
        kept = (torch.from_numpy(np.load(path)) for path in self._kept)
        every = kept if engine is None else (logits.log_softmax(-1) for logits in engine.logits(self._windows))
        for tokens, path, logs in zip(torch.from_numpy(self._windows), self._kept, every, strict=True):
            true, found = torch.from_numpy(np.load(path))[:-1], logs[:-1]
            lost -= float(found.gather(1, tokens[1:, None]).sum(dtype=torch.float64))
            divergence += float((true.exp() * (true - found)).sum(dtype=torch.float64))
            same += int((true.argmax(-1) == found.argmax(-1)).sum())
        count = len(self._windows) * (WINDOW - 1)
        return Score(round(math.exp(lost / count), 4), round(divergence / count, 6), round(same / count, 4))


def windows_of(folder: Path, count: int) -> np.ndarray:
    """The first tokens of the text, int64 [count, WINDOW]."""
    text = "\n".join((ROOT / "docs" / name).read_text() for name in TEXTS)
    ids = Tokenizer.from_file(str(folder / "tokenizer.json")).encode(text).ids[: count * WINDOW]
    return np.array(ids).reshape(count, WINDOW)


def both(file: Path, python: Path, count: int, work: Path) -> dict[str, object]:
    """Scores of a file in vnext and in llama.cpp."""
    folder = gguf_folder(file, work)
    windows = windows_of(folder, count)
    exact = Reference(Setting(folder, torch.float32, "none"), windows, work)
    engines = {
        "vnext": Setting(folder), "vnext --activations bf16": Setting(folder, quantization="codes by bf16"),
        "vnext, bfloat16 weights": Setting(folder, quantization="none"), "llama.cpp": LlamaCpp(file, python),
    }  # fmt: skip
    found = {"float32 arithmetic": exact.score(None)} | {name: exact.score(engine) for name, engine in engines.items()}
    ratio = found["vnext"].perplexity / found["llama.cpp"].perplexity
    return shown(found) | {"tokens": windows.size, "vnext beside llama.cpp": round(ratio, 5)}


def own_schemes(llama: LlamaCpp, count: int, work: Path) -> dict[str, object]:
    """Scores of vnext's schemes, and of llama.cpp's of as many bits, on a file's numbers in float32."""
    file = llama.converted("F32", work / "f32.gguf")
    folder = gguf_folder(file, work)
    windows = windows_of(folder, count)
    exact = Reference(Setting(folder, torch.float32, "none"), windows, work)
    found = {"float32 arithmetic": exact.score(None), "bfloat16": exact.score(Setting(folder, quantization="none"))}
    for name in OWN:
        found[f"--quantization {name}"] = exact.score(Setting(folder, quantization=name))
        found[f"--quantization {name} --activations bf16"] = exact.score(Setting(folder, quantization=f"{name} by bf16"))
    for kind in ("Q8_0", "Q4_0"):
        other = LlamaCpp(llama._replace(file=file).converted(kind, work / "other.gguf"), llama.python)
        found[f"llama.cpp, {kind} of the same"] = exact.score(other)
    for scheme in WRITTEN:
        for _ in Quantiser(folder, work / scheme, scheme, 0).run():
            pass
        found[f"quantize --scheme {scheme}"] = exact.score(Setting(work / scheme))
    return shown(found) | {"tokens": windows.size}


def written(llama: LlamaCpp, schemes: list[str], count: int, work: Path) -> dict[str, object]:
    """Scores in both engines of the files that vnext makes of a file's numbers, beside float32 arithmetic of the source."""
    folder = gguf_folder(llama.file, work)
    windows = windows_of(folder, count)
    exact = Reference(Setting(folder, torch.float32, "none"), windows, work)
    found: dict[str, object] = {"tokens": windows.size, "float32 arithmetic": exact.score(None)._asdict()}
    for scheme in schemes:
        out = work / f"{scheme}.gguf"
        for _ in GgufQuantiser(llama.file, out, scheme, {}).run():
            pass
        scores = {"vnext": exact.score(Setting(gguf_folder(out, work))), "llama.cpp": exact.score(llama._replace(file=out))}
        ratio = round(scores["vnext"].perplexity / scores["llama.cpp"].perplexity, 5)
        found[scheme] = {"MB": round(out.stat().st_size / 1e6, 1), **shown(scores), "vnext beside llama.cpp": ratio}
        print(scheme, json.dumps(found[scheme]), flush=True)
        out.unlink()
    return found


def shown(found: dict[str, Score]) -> dict[str, object]:
    return {name: score._asdict() for name, score in found.items()}


def main() -> None:
    """Print the scores, and write the record."""
    parser = parser_of(__doc__)
    parser.add_argument("models", nargs="*", default=[SMOLLM2, GEMMA], help=f"{SMOLLM2}, {GEMMA}")
    parser.add_argument("--windows", type=int, default=8, help=f"of {WINDOW} tokens")
    parser.add_argument("--written", nargs="+", choices=GGUF_SCHEMES, default=[], help="score what `vnext quantize` writes, alone")
    given, before = parser.parse_args(), machine()
    peers = Path(os.environ.get("PEERS", ROOT / ".peers"))
    python, count = peers / "venvs" / "llamacpp" / "bin" / "python", given.windows
    measured: dict[str, object] = {}
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        for name in given.models:
            llama = LlamaCpp(gguf_file(name, peers / "models"), python)
            if given.written:
                measured[llama.file.stem] = written(llama, given.written, count, work)
                continue
            measured[llama.file.stem] = both(llama.file, python, count, work)
            if name == SMOLLM2:
                measured["the same as Q8_0"] = both(llama.converted("Q8_0", work / "q8_0.gguf"), python, count, work)
                measured["the same as float32, rounded again"] = own_schemes(llama, count, work)
    text = "".join((ROOT / "docs" / name).read_text() for name in TEXTS)
    about = {"text": [f"docs/{name}" for name in TEXTS], "text_sha256": hashlib.sha256(text.encode()).hexdigest()}
    print(json.dumps(measured, indent=1))
    more = f" --written {' '.join(given.written)}" if given.written else ""
    command = f"python -m perf.perplexity {' '.join(given.models)} --windows {count}{more}"
    write_record(given.json, record_of(command, before, about | {"scores": measured}))


if __name__ == "__main__":
    main()
