"""Change files of images and sounds at random and read what comes out: `python -m perf.mutate_media --count 10000`.

Each mutation must be read, or be refused with one sentence that begins with its name, within SECONDS_MAX of the processor and
MEMORY_BYTES_MAX, whatever it says. Files are small ones of all formats, written here; bits flip, bytes and runs become hostile ones,
pieces move, the file ends early or goes on. A number names a mutation (`--first N --count 1` repeats it). Exits with status 1 if one
failed, and ends where one takes the process with it.
"""

from __future__ import annotations

import random
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable
from io import BytesIO
from typing import NamedTuple

import numpy as np
from PIL import Image

from perf.mutate_gguf import HOSTILE, peak_bytes
from perf.record import parser_of, record_of, write_record
from vnext.commands.machine import machine
from vnext.media.pictures import FORMATS, MediaError, picture_of
from vnext.media.sounds import sound_of

SECONDS_MAX, MEMORY_BYTES_MAX = 20.0, 2**30
SOUND_FORMATS = ("WAV", "FLAC", "OGG", "MP3", "AIFF")
NAME = "messages[0].content[0].image_url"


class File(NamedTuple):
    """A right file, and what reads it."""

    kind: str
    data: bytes
    read: Callable[[bytes, str], np.ndarray]


def files() -> list[File]:
    """Of each format, images of colours, palettes, grey, clear ones, several frames, and sounds of one and two channels."""
    import soundfile

    rng, found = np.random.default_rng(3), list[File]()
    picture = Image.fromarray(rng.integers(0, 256, (37, 53, 4), dtype=np.uint8))
    modes = {"PNG": ("RGB", "RGBA", "P", "L", "1", "I;16"), "JPEG": ("RGB", "L", "CMYK"), "WEBP": ("RGB", "RGBA"), "GIF": ("P", "L")}
    modes |= {"BMP": ("RGB", "P", "1"), "AVIF": ("RGB", "RGBA")}
    for form in FORMATS:
        for mode in modes[form]:
            image = picture.convert("L").convert("I").convert(mode) if mode == "I;16" else picture.convert(mode)
            more = {"save_all": True, "append_images": [image] * 2} if form in ("GIF", "WEBP", "AVIF") else {"progressive": mode == "L"} if form == "JPEG" else {}
            image.save(written := BytesIO(), form, **more)
            found.append(File(f"{form} {mode}", written.getvalue(), picture_of))
    wave = rng.standard_normal((4000, 2)) / 4
    for form in SOUND_FORMATS:
        for channels in (1, 2):
            soundfile.write(written := BytesIO(), wave[:, :channels], (16_000, 22_050)[channels - 1], format=form)
            found.append(File(f"{form} {channels}", written.getvalue(), sound_of))
    return found


def mutation(file: File, number: int) -> bytes:
    """The file of a mutation."""
    rng, data = random.Random(number), bytearray(file.data)
    for _ in range(rng.choice((1, 1, 2, 2, 4, 8, 32))):
        if len(data) < 2:
            break
        at = min(int(rng.expovariate(8 / len(data))), len(data) - 1) if rng.random() < 0.7 else rng.randrange(len(data))  # heads, mostly
        match rng.randrange(6):
            case 0:
                data[at] ^= 1 << rng.randrange(8)
            case 1:
                data[at] = rng.choice((0, 1, 127, 128, 255, rng.randrange(256)))
            case 2:
                size = rng.choice((2, 4, 8))
                value = (rng.choice(HOSTILE) % 256**size).to_bytes(size, rng.choice(("little", "big")))
                data[at : at + size] = value
            case 3:
                data[at : at + rng.choice((0, 1, 4, 64))] = rng.choice((b"", b"\0" * 8, b"\xff" * 8, rng.randbytes(16)))
            case 4:
                other = rng.randrange(len(data))
                data[at:at] = data[other : other + rng.choice((1, 12, 200))]
            case _ if rng.random() < 0.2:
                del data[max(at, 1) :]
    return bytes(data)


def judged(file: File, data: bytes) -> str:
    """How a mutation was read: "read", "refused", or why that is wrong."""
    begun_s = time.process_time()
    try:
        found = file.read(data, NAME)
        verdict = "read" if found.size and (found.ndim == 3 or np.isfinite(found).all()) else f"read as {found.shape}"
    except MediaError as error:
        sentence = str(error)
        verdict = "refused" if sentence.startswith(NAME) and "\n" not in sentence and len(sentence) < 300 else f"refused with {sentence[:400]!r}"
    except BaseException:  # whatever comes is a finding
        verdict = traceback.format_exc()
    return verdict if time.process_time() - begun_s < SECONDS_MAX else f"{verdict}, within {time.process_time() - begun_s:.0f} s"


def main() -> int:
    """Mutate and judge."""
    parser = parser_of(__doc__)
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--first", type=int, default=0)
    options, before, given = parser.parse_args(), machine(), files()
    for file in given:
        assert judged(file, file.data) == "read", file.kind
    idle_bytes, begun_s, failed = peak_bytes(), time.process_time(), 0
    verdicts: dict[str, Counter[str]] = {}
    for number in range(options.first, options.first + options.count):
        file = given[number % len(given)]
        verdict = judged(file, mutation(file, number))
        if verdict not in ("read", "refused"):
            print(f"{number}, {file.kind}: {verdict}", flush=True)
            failed, verdict = failed + 1, "failed"
        verdicts.setdefault(file.kind, Counter())[verdict] += 1
    used = peak_bytes() - idle_bytes
    measured = {
        "count": options.count, "failed": failed, "verdicts": {kind: dict(each) for kind, each in verdicts.items()},
        "peak_bytes": used, "processor_seconds": round(time.process_time() - begun_s, 1),
    }  # fmt: skip
    print(f"{sum(verdicts.values(), Counter())}, {used / 2**20:.0f} MiB")
    write_record(options.json, record_of(" ".join(["python -m perf.mutate_media", *sys.argv[1:]]), before, measured))
    return int(failed > 0 or used > MEMORY_BYTES_MAX)


if __name__ == "__main__":
    sys.exit(main())
