"""Tokenizers of GGUF files beside llama.cpp's own on the same lines: `python -m perf.gguf_tokenizers FILE ... --json FILE`.

Half of the lines come from files of this machine (programs, texts and translations), half are drawn: letters of many scripts, emoji with
their joiners, runs of white space, control characters, marks without a letter, names of special tokens. A line that differs is
shown. With `--names` the first file's vocabulary stands for those that name other pre-tokenizers: each name that we know, in both. Needs the environment of `perf/peers/setup.sh llamacpp`; `PEERS` names its folder.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import subprocess
import sys
import tempfile
import unicodedata
from collections.abc import Iterator
from pathlib import Path

from tokenizers import Tokenizer

from perf.record import parser_of, record_of, write_record
from vnext.commands.machine import machine
from vnext.models.gguf.header import read_header
from vnext.models.gguf.tokenizer import CONTROL, CUTS, USER_DEFINED, Vocabulary

ROOT = Path(__file__).resolve().parents[1]
RUNNER = ROOT / "perf" / "peers" / "tokenize_llamacpp.py"
PLACES = (ROOT, Path(sys.prefix) / "lib", Path("/usr/share"))
SUFFIXES = frozenset((".py", ".md", ".txt", ".c", ".cpp", ".h", ".js", ".json", ".sh", ".pl", ".rst", ".html", ".xml", ".css", ".toml"))
PRE, STRING_BYTES = b"tokenizer.ggml.pre", 4
FILE_LINES, FILE_BYTES, LINE_CHARACTERS = 200, 2**20, 400
SCRIPTS = (
    (0x20, 0x7E), (0x20, 0x7E), (0x30, 0x39), (0xA0, 0x24F), (0x370, 0x52F), (0x590, 0x6FF), (0x900, 0x97F), (0xE00, 0xE7F),
    (0x3040, 0x30FF), (0x4E00, 0x9FFF), (0xAC00, 0xD7A3), (0x1F300, 0x1FAFF), (0x2000, 0x206F), (0x2150, 0x218F), (0x300, 0x36F),
    (0x0, 0x1F), (0x7F, 0x9F), (0xE000, 0xE0FF), (0x20000, 0x200FF), (0x1D400, 0x1D7FF), (0xFE00, 0xFE0F), (0xFFF0, 0xFFFF),
)  # fmt: skip
"""Ranges of characters, both ends within."""
WHITE = (" ", "  ", "    ", "\t", "\n", "\n\n", "\r\n", "\u00a0", "\u2003", "\u3000", "\u2581", "\u0085", "\u200b", "\x0b", "\x0c")
PIECES = (
    "'s", "'LL", "don't", "It's", "HelloWorld", "camelCase", "123", "4567890", "3.14", "0x1F", "def f(x):", "return", "();", "!=",
    "👩\u200d👩\u200d👧\u200d👦", "🇩🇪", "👍🏽", "e\u0301", "ﷺ", "½", "²", "Ⅷ", "日本語", "한국어", "中文。", "ไทย", "हिन्दी", "العربية", "שלום", "ẞ", "İ", "ſ",
)  # fmt: skip


def drawn(count: int, special: list[str]) -> Iterator[str]:
    """The same lines every time."""
    rng = random.Random(34)
    for _ in range(count):
        parts = []
        for _ in range(rng.randrange(1, 12)):
            kind = rng.random()
            if kind < 0.45:
                first, last = rng.choice(SCRIPTS)
                parts.append("".join(chr(rng.randint(first, last)) for _ in range(rng.randrange(1, 8))))
            elif kind < 0.7:
                parts.append(rng.choice(PIECES))
            elif kind < 0.97:
                parts.append(rng.choice(WHITE) * rng.choice((1, 1, 1, 2, 3, 17, 40)))
            else:
                parts.append(rng.choice(special))
        yield "".join(parts)


def special_texts(vocabulary: Vocabulary) -> list[str]:
    """Of tokens that stand whole in a text."""
    return [text for text, kind in zip(vocabulary.tokens, vocabulary.types) if kind in (CONTROL, USER_DEFINED)]


def found(count: int) -> list[str]:
    """Lines of files, a few of each, as many of each place as there are."""
    lines: list[str] = []
    for number, place in enumerate(PLACES, 1):
        paths = sorted(path for path in place.rglob("*") if path.suffix in SUFFIXES or (path.suffix == ".mo" and place == PLACES[-1]))
        random.Random(34).shuffle(paths)
        for path in paths:
            if len(lines) >= count * number // len(PLACES):
                break
            if path.is_file() and path.stat().st_size <= FILE_BYTES:
                kept = path.read_text(errors="ignore").splitlines()[:FILE_LINES]
                lines += [line[:LINE_CHARACTERS] for line in kept if line.strip("\0")]
    return lines[:count]


def differences(file: Path, lines: list[str], python: Path) -> list[tuple[str, list[int], list[int]]]:
    """(line, our ids, llama.cpp's) of each line where they differ."""
    ours = Tokenizer.from_str(json.dumps(Vocabulary(read_header(file).metadata).json()))
    with tempfile.TemporaryDirectory() as work:
        written, out = Path(work) / "lines.json", Path(work) / "ids.json"
        written.write_text(json.dumps(lines))
        subprocess.run([python, RUNNER, file, written, out], check=True, stderr=subprocess.DEVNULL)
        theirs = json.loads(out.read_text())
    mine = [each.ids for each in ours.encode_batch(lines, add_special_tokens=False)]
    return [each for each in zip(lines, mine, theirs, strict=True) if each[1] != each[2]]


def with_pre_tokenizer(file: Path, name: str, out: Path) -> Path:
    """The vocabulary of a file, whose metadata name this pre-tokenizer, without tensors."""
    header = read_header(file)
    whole = file.read_bytes()[: header.size_bytes]
    value = whole.index(PRE) + len(PRE) + STRING_BYTES
    own = str(header.metadata[PRE.decode()]).encode()
    assert whole[value + 8 :].startswith(own)
    changed = whole[:value] + len(name).to_bytes(8, "little") + name.encode() + whole[value + 8 + len(own) :]
    out.write_bytes(changed[:8] + bytes(8) + changed[16:])
    return out


def pre_tokenizers(file: Path, lines: list[str], python: Path) -> dict[str, int]:
    """Lines that differ, by the name of the pre-tokenizer that stands in the file's place of its own."""
    found = {}
    with tempfile.TemporaryDirectory() as work:
        for name, cut in CUTS.items():
            meant = [unicodedata.normalize("NFC", line) for line in lines] if cut.composes else lines
            differing = differences(with_pre_tokenizer(file, name, Path(work) / "named.gguf"), meant, python)
            found[name] = len(differing)
            for each in differing[:3]:
                print(name, *map(repr, each), sep="\n    ")
    return found


def main() -> None:
    """Print what differs, and write the record."""
    parser = parser_of(__doc__)
    parser.add_argument("files", type=Path, nargs="+", help="GGUF files")
    parser.add_argument("--lines", type=int, default=100_000)
    parser.add_argument("--names", action="store_true", help="every pre-tokenizer in the first file's place of its own, and nothing else")
    given, before = parser.parse_args(), machine()
    python = Path(os.environ.get("PEERS", ROOT / ".peers")) / "venvs" / "llamacpp" / "bin" / "python"
    from_files, measured = found(given.lines // 2), {}
    if given.names:
        lines = [*from_files, *drawn(given.lines - len(from_files), ["<|im_end|>"])]
        measured = {"lines": len(lines), "lines_that_differ": pre_tokenizers(given.files[0], lines, python)}
    for file in given.files * (not given.names):
        special = special_texts(Vocabulary(read_header(file).metadata))
        lines = [*from_files, *drawn(given.lines - len(from_files), special)]
        differing = differences(file, lines, python)
        for each in differing[:20]:
            print(*map(repr, each), sep="\n    ")
        digest = hashlib.sha256("\n".join(lines).encode()).hexdigest()
        measured[file.name] = {"lines": len(lines), "lines_sha256": digest, "lines_that_differ": len(differing)}
    print(json.dumps(measured, indent=1))
    names = " ".join(file.name for file in given.files)
    write_record(given.json, record_of(f"python -m perf.gguf_tokenizers {names} --lines {given.lines}{' --names' * given.names}", before, {"files": measured}))


if __name__ == "__main__":
    main()
