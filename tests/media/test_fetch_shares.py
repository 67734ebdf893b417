"""One client's addresses, of servers that do not answer, take no more than its share of the threads that fetch."""

from __future__ import annotations

import asyncio
import threading
from types import MappingProxyType, SimpleNamespace
from typing import cast

import pytest

from vnext.media.custom import Custom
from vnext.media.pictures import MediaError, NoRoom
from vnext.server.context import images
from vnext.server.context.errors import Failure, MediaFull, failure_of
from vnext.server.context.images import FETCHES_MAX, PromptImages
from vnext.server.context.text_work import THREADS, TextWork
from vnext.server.settings import ServerSettings


class Reader:
    """Fetches what hangs until it may end, and other addresses at once."""

    shown = MappingProxyType({"image": "here"})

    def __init__(self, *_: object) -> None:
        self.ends, self.hanging = threading.Event(), list[str]()

    def bytes_at(self, address: str, name: str) -> bytes:
        if "hangs" in address:
            self.hanging.append(name)
            self.ends.wait(60)
            raise MediaError(f"{name} could not be fetched")
        return b"bytes"

    def seen(self, given: bytes, name: str, is_alone: bool, custom: Custom) -> bytes:
        return given

    film = heard = seen


def test_a_client_has_half_of_the_threads_that_fetch_even_when_it_has_left(monkeypatch: pytest.MonkeyPatch) -> None:
    reader = Reader()
    monkeypatch.setattr(images, "ImageReader", lambda *_: reader)
    given = {"allowed_local_media_path": "", "allowed_media_domains": (), "engine_address": "a", "other_engines": (), "model_path": "m"}

    async def work() -> None:
        texts = TextWork(10_000)
        read = PromptImages(cast(ServerSettings, SimpleNamespace(**given)), "", texts).read
        share = FETCHES_MAX // 2
        for turn in range(2):
            waiting = [asyncio.create_task(read([("http://hangs/", str(each), "image")], "greedy")) for each in range(3 * FETCHES_MAX)]
            await asyncio.sleep(0.05)
            assert await asyncio.wait_for(read([("http://good/", "it", "image")], "other"), 30) == [b"bytes"], turn
            assert len(reader.hanging) == share, "those who have left are fetched for"
            for each in waiting:
                each.cancel()
            await asyncio.gather(*waiting, return_exceptions=True)
        reader.ends.set()
        assert await asyncio.wait_for(read([("http://good/", "it", "image")], "greedy"), 30) == [b"bytes"]
        texts.close()

    asyncio.run(work())


def test_a_full_store_asks_for_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    class Full(Reader):
        def seen(self, given: bytes, name: str, is_alone: bool, custom: Custom) -> bytes:
            raise NoRoom(f"{name} cannot be kept here: No space left on device")

    monkeypatch.setattr(images, "ImageReader", Full)
    given = {"allowed_local_media_path": "", "allowed_media_domains": (), "engine_address": "a", "other_engines": (), "model_path": "m"}

    async def work() -> Failure:
        texts = TextWork(10_000)
        try:
            await PromptImages(cast(ServerSettings, SimpleNamespace(**given)), "", texts).read([("data:,", "it", "image")], "one")
        except MediaFull as error:
            return failure_of(error)
        finally:
            texts.close()
        raise AssertionError("it was kept")

    found = asyncio.run(work())
    assert found.message == "it cannot be kept here: No space left on device: send it again later."
    answer = found.response()
    assert (answer.status, answer.headers["Retry-After"]) == (503, "60")


def test_a_client_has_half_of_the_threads_that_read_media_even_when_it_has_left() -> None:
    async def work() -> None:
        texts, ends, begun = TextWork(10_000), threading.Event(), list[str]()

        def hang() -> None:
            begun.append("greedy")
            ends.wait(60)

        waiting = [asyncio.create_task(texts.run_media(100, "greedy", hang)) for _ in range(3 * THREADS)]
        await asyncio.sleep(0.05)
        assert await asyncio.wait_for(texts.run_media(100, "other", lambda: "read"), 30) == "read"
        assert len(begun) == THREADS // 2
        for each in waiting:
            each.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        late = asyncio.create_task(texts.run_media(100, "greedy", hang))
        assert await asyncio.wait_for(texts.run_media(100, "other", lambda: "read"), 30) == "read"
        assert len(begun) == THREADS // 2 and texts.characters == 200, "those who have left are read for, and their bytes are held"
        ends.set()
        await late
        while texts.characters:
            await asyncio.sleep(0.01)
        texts.close()

    asyncio.run(work())
