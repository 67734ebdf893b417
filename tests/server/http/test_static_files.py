"""A page's files: each by its name, with the digest of its bytes, and nothing else of the disk."""

from __future__ import annotations

import asyncio
import hashlib
from pathlib import Path

import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer

from vnext.server.http.static_files import HEADERS, StaticFiles, isolate


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "page" / "below").mkdir(parents=True)
    (tmp_path / "page" / "index.html").write_text("<title>a</title>")
    (tmp_path / "page" / "main.js").write_text("let a = 1;")
    (tmp_path / "other.js").write_text("another's")
    return tmp_path / "page"


def asked(folder: Path, *paths: str, **headers: str) -> list[tuple[int, bytes, dict[str, str]]]:
    async def ask() -> list[tuple[int, bytes, dict[str, str]]]:
        app = web.Application()
        app.on_response_prepare.append(isolate)
        StaticFiles(folder).add_to(app, "/page/")
        async with TestClient(TestServer(app)) as client:
            answers = [await client.get(path, headers=headers) for path in paths]
            return [(each.status, await each.read(), dict(each.headers)) for each in answers]

    return asyncio.run(ask())


def test_each_file_by_its_name_with_its_digest(folder: Path) -> None:
    start, script = asked(folder, "/page/", "/page/main.js")
    assert (start[:2], script[:2]) == ((200, b"<title>a</title>"), (200, b"let a = 1;"))
    assert script[2]["Content-Type"] == "text/javascript; charset=utf-8"
    assert script[2]["Etag"] == f'"{hashlib.sha256(script[1]).hexdigest()}"'
    assert script[2].items() >= HEADERS.items()


def test_who_has_the_file_is_sent_nothing(folder: Path) -> None:
    etag = asked(folder, "/page/main.js")[0][2]["Etag"]
    assert asked(folder, "/page/main.js", **{"If-None-Match": etag})[0][:2] == (304, b"")
    assert asked(folder, "/page/", **{"If-None-Match": etag})[0][0] == 200, "another file"


def test_nothing_else_of_the_disk(folder: Path) -> None:
    found = asked(folder, "/page/..%2Fother.js", "/page/below", "/page/none.js", "/page", "/main.js")
    assert [status for status, _, _ in found] == [404] * 5 and all(b"another's" not in body for _, body, _ in found)
