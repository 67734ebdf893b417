"""Pages of a device as a tier copies them, on the twin: bit for bit, in any dtype, and in the only order that is right."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from device_twin import OrderError, TwinDevice, TwinMark

from vnext.runtime.gpu import pages as device_pages
from vnext.runtime.gpu.device import Mark
from vnext.runtime.gpu.pages import ROWS, DeviceFilling, DevicePages

HEADER, PAGES = 68, 40
Caches = list[tuple[tuple[torch.Tensor, torch.Tensor], ...]]


class Ordered(TwinDevice):
    """Refuses copies beside the work that do not wait for all `work` there was when their transfer began."""

    work = begun = 0

    def mark(self) -> TwinMark:
        mark = super().mark()
        mark.work = self.work
        return mark

    def beside(self, copy: Callable[[], object], after: Mark | None) -> TwinMark:
        if after is not None and after.work < self.begun:
            raise OrderError("a page is filled while a step may read it")
        return super().beside(copy, after)


class Memory:
    """A rank's caches, with those of a draft model."""

    def __init__(self, seed: int, dtype: torch.dtype = torch.bfloat16, width: int = 8) -> None:
        generator = torch.Generator().manual_seed(seed)

        def cache(layers: int, dtype: torch.dtype, heads: int) -> tuple[tuple[torch.Tensor, torch.Tensor], ...]:
            def bits() -> torch.Tensor:
                size = PAGES * heads * 4 * width * dtype.itemsize
                drawn = torch.randint(0, 256, (size,), dtype=torch.uint8, generator=generator)
                return drawn.view(dtype).view(PAGES, heads, 4, width)

            return tuple((bits(), bits()) for _ in range(layers))

        self.caches: Caches = [cache(3, dtype, 2), cache(1, torch.bfloat16, 1)]
        self.device = Ordered()
        self.pages = DevicePages(self.device, HEADER, len(self.page(0)))
        self.pages.use(self.caches)

    def page(self, number: int) -> bytes:
        """The bits of a page."""
        arrays = [array for cache in self.caches for pair in cache for array in pair]
        return b"".join(array[number].contiguous().view(torch.uint8).numpy().tobytes() for array in arrays)

    def all(self) -> list[bytes]:
        return [self.page(number) for number in range(PAGES)]

    def copied(self, numbers: Sequence[int]) -> list[bytes]:
        """What a tier writes, after the next step has written to the same pages."""
        parts = self.pages.copy(numbers)
        for array in (array for cache in self.caches for pair in cache for array in pair):
            array[list(numbers)] = 0
        return [b"".join(page) for page in parts()]

    def begin(self) -> DeviceFilling:
        """A transfer, behind one more step."""
        self.device.work += 1
        self.device.begun = self.device.work
        return self.pages.fill()

    def read(self, filling: DeviceFilling, files: dict[int, bytes]) -> None:
        """The reader's part and, after each file, the rank's look."""
        for number, data in files.items():
            room = filling.room()
            assert room is not None
            room[HEADER:] = data
            assert filling.put(number)
            filling.look()

    def filled(self, files: dict[int, bytes]) -> list[bytes]:
        """All pages behind a transfer."""
        filling = self.begin()
        self.read(filling, files)
        while not filling.look():
            pass
        filling.stop()
        return self.all()


@pytest.mark.parametrize(
    ("dtype", "width"), [(torch.float16, 8), (torch.bfloat16, 16), (torch.float32, 8), (torch.int8, 9), (torch.int8, 1)]
)
def test_pages_leave_and_come_back_bit_for_bit(dtype: torch.dtype, width: int) -> None:
    """More of them than there are rows; the bits are random, NaNs among them."""
    left, right = Memory(1, dtype, width), Memory(2, dtype, width)
    expected, others = left.all(), right.all()
    numbers = [(7 * place + 3) % PAGES for place in range(ROWS + 5)]
    found = left.copied(numbers)
    assert found == [expected[number] for number in numbers], "as they were before the next step"
    files = dict(zip(range(PAGES - 1, 0, -1), found))
    assert right.filled(files) == [files.get(number, others[number]) for number in range(PAGES)]
    again = {number: files[PAGES - 1] for number in (0, 9)}
    assert right.filled(again) == [(files | again).get(number, others[number]) for number in range(PAGES)]


def not_waited_for(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(TwinMark, "is_reached", lambda self: True)


def test_a_page_that_is_read_before_it_has_come_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = Memory(1)
    expected = memory.all()
    not_waited_for(monkeypatch)
    assert memory.copied([3, 1]) != [expected[3], expected[1]]


def without_join(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(DevicePages, "join", lambda self, mark: None)


def beside_earlier_work(patch: pytest.MonkeyPatch) -> None:
    send = DevicePages.send
    patch.setattr(DevicePages, "send", lambda self, pages, rows, after: send(self, pages, rows, None))


def behind_an_older_mark(patch: pytest.MonkeyPatch) -> None:
    init, old = DevicePages.__init__, []

    def noting(self: DevicePages, device: TwinDevice, *sizes: int) -> None:
        old.append(device.mark())
        init(self, device, *sizes)

    patch.setattr(DevicePages, "__init__", noting)
    patch.setattr(DevicePages, "fill", lambda self: DeviceFilling(self, old[0]))


def into_the_next_page(patch: pytest.MonkeyPatch) -> None:
    send = DevicePages.send
    patch.setattr(DevicePages, "send", lambda self, pages, rows, after: send(self, [page + 1 for page in pages], rows, after))


def rows_too_early(patch: pytest.MonkeyPatch) -> None:
    send = DevicePages.send

    def early(self: DevicePages, pages: Sequence[int], rows: Sequence[int], after: Mark) -> Mark:
        self.give_back(rows)
        return send(self, pages, rows, after)

    patch.setattr(DevicePages, "send", early)
    patch.setattr(DevicePages, "recycle", lambda self: None)


@pytest.mark.parametrize("plant", [without_join, beside_earlier_work, behind_an_older_mark, into_the_next_page, rows_too_early])
def test_planted_faults_of_a_transfer_are_found(
    monkeypatch: pytest.MonkeyPatch, plant: Callable[[pytest.MonkeyPatch], None]
) -> None:
    files = {number: bytes([number]) * len(Memory(1).page(0)) for number in range(2 * ROWS)}

    def found() -> list[bytes] | None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(device_pages, "ROOM_WAIT_S", 0.05)
            try:
                return Memory(1).filled(files)
            except OrderError:
                return None

    right = found()
    assert right is not None and right[: 2 * ROWS] == list(files.values())
    plant(monkeypatch)
    assert found() != right


def given_up() -> tuple[Memory, dict[str, Any]]:
    """A transfer that ends with one page sent, one read, and its pages in a step's hands."""
    memory = Memory(1)
    before, data = memory.all(), bytes([9]) * len(memory.page(0))
    filling = memory.begin()
    memory.read(filling, {2: data})
    filling.look()
    room = filling.room()
    room[HEADER:] = data
    assert filling.put(3)
    filling.stop()
    sent = memory.page(2)
    for array in (array for cache in memory.caches for pair in cache for array in pair):
        array[2] = 0
    assert not filling.put(4) and filling.room() is None
    while memory.pages._lent:
        memory.pages.recycle()
    return memory, {"sent": sent == data, "unsent": memory.page(3) == before[3], "kept": not any(memory.page(2))}


def test_a_transfer_that_is_given_up_touches_no_page_behind_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    memory, found = given_up()
    assert found == {"sent": True, "unsent": True, "kept": True}
    assert memory.pages._free.qsize() == ROWS, "every row can be written again"
    without_join(monkeypatch)
    assert not given_up()[1]["kept"], "a copy that nothing is ordered behind spoils the step's page"
