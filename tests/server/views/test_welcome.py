"""GET / and GET /docs: every path of the server is there, and nothing that a request says is markup."""

from __future__ import annotations

import http.client
import shlex

import pytest

from vnext.server.context.openai_types import ChatBody
from vnext.server.routes import ROUTES
from vnext.server.views.welcome import HOST_UNKNOWN, Route

SHOWN = [each for each in ROUTES if each.is_listed]


def get(server, path: str, host: str | bytes | None = None) -> tuple[http.client.HTTPResponse, str]:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    connection.putrequest("GET", path, skip_host=host is not None)
    if host is not None:
        connection.putheader("Host", host)
    connection.endheaders()
    response = connection.getresponse()
    text = response.read().decode()
    connection.close()
    return response, text


def test_every_route_is_named_once(server) -> None:
    routes = {(route.method, route.resource.canonical) for route in server.app.router.routes() if route.method != "HEAD"}
    shown = {(each.method, each.plain_path) for each in SHOWN}
    assert shown <= routes and len(routes) == len(ROUTES)
    in_words = {("GET", "/api/ps"), ("GET", "/api/version"), ("GET", "/page/{name}"), ("GET", "/ping"), ("POST", "/ping"), ("GET", "/v1/models/{model}"), ("GET", "/log/{segment}")}
    in_words |= {("GET", "/v1/files/{file_id}"), ("DELETE", "/v1/files/{file_id}"), ("GET", "/v1/files/{file_id}/content")}
    in_words |= {("GET", "/v1/batches/{batch_id}"), ("POST", "/v1/batches/{batch_id}/cancel")}
    in_words |= {("DELETE", "/v1/responses/{response_id}"), ("GET", "/v1/responses/{response_id}/input_items")}
    in_words |= {("POST", "/v1/responses/{response_id}/cancel")}
    in_words |= {("POST", path) for path in ("/v1/rerank", "/v2/rerank", "/v1/score", "/api/embeddings")}
    assert routes - shown == in_words


@pytest.mark.parametrize(("path", "kind"), [("/", "text/plain"), ("/docs", "text/html")])
def test_a_browser_finds_the_paths_and_a_line_to_try(server, path: str, kind: str) -> None:
    response, text = get(server, path)
    assert response.status == 200 and response.headers.get_content_type() == kind
    assert all(each.plain_path in text for each in SHOWN)
    assert f"curl -s http://127.0.0.1:{server.port}/v1/" in text
    assert "src=" not in text and "href=" not in text, "nothing is loaded from elsewhere"


def test_the_fields_of_bodies_are_those_that_are_read(server) -> None:
    assert ", ".join(ChatBody.__struct_fields__) in get(server, "/docs")[1]


def test_a_host_header_is_neither_markup_nor_a_shell_s_word(server) -> None:
    host = "<script>alert(1)</script>;reboot"
    assert "<script>" not in get(server, "/docs", host)[1]
    line = next(line for line in get(server, "/", host)[1].splitlines() if line.startswith("curl"))
    assert shlex.split(line)[2] == f"http://{host}/v1/chat/completions"


@pytest.mark.parametrize("path", ["/", "/docs"])
def test_bytes_that_are_no_text_do_not_come_back(server, path: str) -> None:
    response, text = get(server, path, b"caf\xdd:8000")
    assert response.status == 200 and f"curl -s http://{HOST_UNKNOWN}/v1/" in text


@pytest.mark.parametrize("path", ["/", "/docs"])
def test_a_page_is_made_once(server, monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    page = get(server, path)[1]
    looked: list[str] = []
    monkeypatch.setattr(Route, "plain_path", property(lambda self: looked.append(self.path) or self.path))
    monkeypatch.setattr(Route, "fields", property(lambda self: looked.append(self.path) or ()))
    assert get(server, path)[1] == page and not looked
    assert f"curl -s http://localhost:{server.port}/v1/" in get(server, path, f"localhost:{server.port}")[1], "each host has its line"
