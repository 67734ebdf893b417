"""Adapters at several API servers of one port: a name that one serves is served by all, once, and forgotten by all."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import pytest

from vnext.runtime.protocol.messages import AdapterFiles
from vnext.runtime.protocol.sampling_params import InvalidRequest
from vnext.server.context import adapters
from vnext.server.context.adapters import ServedAdapters
from vnext.server.context.api_keys import EVERYONE, Tenant
from vnext.server.context.errors import ModelUnknown
from vnext.server.settings import ServerSettings


@pytest.fixture(autouse=True)
def any_folder_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapters, "adapter_files", lambda asked, *_: AdapterFiles(asked.lora_name, "0" * 32, asked.lora_path))


def served(tmp_path: Path) -> ServedAdapters:
    settings = ServerSettings(lora_root=str(tmp_path), shared_dir=str(tmp_path), lora_modules=(f"everyones={tmp_path}",))
    return ServedAdapters(settings, ("toy",), True, {})


def test_names_come_and_go_at_all_and_outlive_a_process(tmp_path: Path) -> None:
    first, second, one, other = served(tmp_path), served(tmp_path), Tenant("one", False), Tenant("other", False)
    asyncio.run(first.load("mine", str(tmp_path), one))
    assert second.names(one) == ("everyones", "mine") and second.names(other) == ("everyones",)
    assert second.files("mine", one) == first.files("mine", one) and second.files("mine", other) is None
    with pytest.raises(InvalidRequest, match="'mine' is taken"):
        asyncio.run(second.load("mine", str(tmp_path), one))
    asyncio.run(second.load("more", str(tmp_path), one))
    assert first.names(one) == served(tmp_path).names(one) == ("everyones", "mine", "more")
    with second.used("mine", one), pytest.raises(InvalidRequest, match="in use by 1 call:"):
        asyncio.run(second.unload("mine", one))
    with second.used("mine", one):
        asyncio.run(first.unload("mine", one))
    assert second.names(one) == first.names(one) == ("everyones", "more")
    with pytest.raises(ModelUnknown):
        asyncio.run(second.unload("mine", one))
    asyncio.run(second.load("mine", str(tmp_path), one))
    asyncio.run(first.unload("mine", one))
    assert second.everyones(["everyones", "more"]) == ["everyones"]


def test_of_many_that_want_one_name_one_gets_it(tmp_path: Path) -> None:
    """At the same time, and no name of another is lost."""
    both, ends, together = [served(tmp_path) for _ in range(4)], list[str](), threading.Barrier(4, timeout=20)

    def load(place: int) -> None:
        for number in range(12):
            together.wait()
            try:
                asyncio.run(both[place].load(f"name-{number}", str(tmp_path)))
                ends.append(f"name-{number}")
            except InvalidRequest as error:
                assert "is taken" in error.message
            asyncio.run(both[place].load(f"own-{place}-{number}", str(tmp_path)))

    threads = [threading.Thread(target=load, args=(place,)) for place in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(ends) == sorted(f"name-{number}" for number in range(12))
    own = {f"own-{place}-{number}" for place in range(4) for number in range(12)}
    for each in both:
        assert set(each.names(EVERYONE)) == {"everyones", *ends, *own}
