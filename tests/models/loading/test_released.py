"""Memory of a checkpoint's pages that were read: given back whole, with the neighbours that came with them."""

from __future__ import annotations

import re
from mmap import PAGESIZE
from pathlib import Path

from vnext.models.loading.sources.safetensors import mapped, release

MIB = 2**20


def resident(file: Path) -> int:
    """Bytes of this process's maps of a file that are in its memory."""
    maps = re.findall(rf"{re.escape(str(file))}\n(?:\w+: .*\n)*?Rss: +(\d+) kB", Path("/proc/self/smaps").read_text())
    return 1024 * sum(map(int, maps))


def test_what_came_with_a_tensor_goes_with_it(tmp_path: Path) -> None:
    file = tmp_path / "file"
    with file.open("wb", buffering=0) as stream:
        for place in range(2 * MIB - PAGESIZE, -1, -PAGESIZE):  # so that the system keeps page by page, as of a large file
            stream.seek(place)
            stream.write(bytes(PAGESIZE))
    mapping = mapped(file)
    for start in (0, 300_000, MIB - 5000, 2 * MIB - 7):
        assert mapping[start] == mapping[min(start + 20_000, 2 * MIB - 1)] == 0 and resident(file) > 0
        release(mapping, start, min(start + 20_001, 2 * MIB))
        assert resident(file) == 0, start
