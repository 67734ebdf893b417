"""Served adapters: how many names there may be, and how long one."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from vnext.runtime.protocol.sampling_params import InvalidRequest
from vnext.server.context import adapters
from vnext.server.context.adapters import ServedAdapters
from vnext.server.context.api_keys import EVERYONE
from vnext.server.settings import ServerSettings


@pytest.mark.parametrize(
    ("name", "sentence"),
    [("a" * 257, "A name of 257 characters is too long"), ("toy", "is taken or empty"), ("", "is taken or empty"), ("a", "unload one first")],
)
def test_names_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, sentence: str) -> None:
    monkeypatch.setattr(adapters, "NAMES_MAX", 0)
    served = ServedAdapters(ServerSettings(lora_root=str(tmp_path)), ("toy",), True, {})
    with pytest.raises(InvalidRequest, match=sentence) as refused:
        asyncio.run(served.load(name, str(tmp_path)))
    assert refused.value.param == "lora_name" and served.names(EVERYONE) == ()


def test_an_error_names_the_path_that_the_client_sent(tmp_path: Path) -> None:
    (tmp_path / "kept").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "kept")
    served = ServedAdapters(ServerSettings(lora_root=str(tmp_path)), ("toy",), True, {})
    with pytest.raises(InvalidRequest, match="link has no adapter_config.json") as refused:
        asyncio.run(served.load("a", str(tmp_path / "link")))
    assert refused.value.param == "lora_path" and "kept" not in refused.value.message


def test_without_a_folder_for_adapters_the_error_names_the_option(tmp_path: Path) -> None:
    served = ServedAdapters(ServerSettings(), ("toy",), True, {})
    with pytest.raises(InvalidRequest, match="start the server with --lora-root FOLDER"):
        asyncio.run(served.load("a", str(tmp_path)))
