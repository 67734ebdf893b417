"""Servers that are followed: each engine's view, which of them a request is on its way to, and decisions that can be made again."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from core_drive import Engine, started_with
from router_here import RouterHere, Toy, wait_until

from vnext.base.version import __version__
from vnext.gateway.backends import EngineViews
from vnext.log.stream import EventStreams
from vnext.replay.cli.main import main
from vnext.routing.decision_file import DecisionFile, files_of
from vnext.routing.decisions import FORMAT_VERSION, Header, read
from vnext.routing.prompts import Prompt
from vnext.routing.view import View
from vnext.server.context.identity import ENGINES_HEADER
from vnext.state.digest import digest
from vnext.state.events import pack_tokens

COUNTING, OTHER = list(range(1, 17)), list(range(30, 46))


class Streamed:
    """An engine whose events go to its readers."""

    def __init__(self) -> None:
        self.engine = Engine(page_count=64)
        self.streams = EventStreams(started_with(self.engine.state.config), __version__)
        self._fold, self.engine.fold = self.engine.fold, self.fold

    def fold(self, event: Any) -> Any:
        state = self._fold(event)
        for reader, frame in self.streams.frames([event], state, digest(state)):
            reader(frame)
        return state


class Followed(Toy):
    """A server that looks like vnext's, with engines that tests drive in its loop."""

    def __init__(self, count: int = 1) -> None:
        super().__init__("demo")
        self.engines = [Streamed() for _ in range(count)]

    def views(self) -> dict[str, Any]:
        return super().views() | {"/server_info": self._server_info, "/events": self._events}

    async def _server_info(self, _: web.Request) -> web.Response:
        return web.json_response({"version": __version__, "system_fingerprint": "fp", "environment": {"batch_invariant": "yes"}})

    async def _events(self, request: web.Request) -> web.StreamResponse:
        each, parts = self.engines[int(request.query["engine"])], asyncio.Queue()
        response = web.StreamResponse(headers={ENGINES_HEADER: str(len(self.engines))})
        await response.prepare(request)
        await response.write(each.streams.begin(parts.put_nowait, each.engine.state))
        while True:
            await response.write(await parts.get())

    def drive(self, number: int, prompt: list[int], name: str = "") -> None:
        """An engine computes a prompt."""

        async def drive() -> None:
            self.engines[number].engine.arrive(prompt, max_tokens=2, **({"name": name} if name else {}))
            self.engines[number].engine.run_out()

        self.in_loop(drive())


def hits(router: RouterHere, prompt: list[int]) -> list[int]:
    """Of each server, as the policy is given them."""
    return [each.exact.candidate(Prompt(pack_tokens([*prompt, 99])), True).hit_tokens for each in router.context.fleet]


@pytest.fixture
def four() -> Iterator[list[Followed]]:
    with ExitStack() as stack:
        yield [stack.enter_context(Followed()) for _ in range(4)]


def exact_over(servers: list[Followed], **settings: Any) -> RouterHere:
    return RouterHere(*(each.url for each in servers), **settings)


def test_a_router_that_starts_again_is_exact_with_its_servers_first_bytes(four: list[Followed]) -> None:
    for number, server in enumerate(four):
        server.drive(0, [20 + number, *COUNTING])
    for _ in range(2):
        with exact_over(four) as router:
            wait_until(lambda: all(each.is_exact for each in router.context.fleet))
            assert [hits(router, [20 + number, *COUNTING]) for number in range(4)] == [
                [16 * (place == number) for place in range(4)] for number in range(4)
            ]
            assert [each.exact.views[0].snapshots for each in router.context.fleet] == [1] * 4


def test_all_engines_of_a_server_are_followed() -> None:
    with Followed(3) as server, exact_over([server]) as router:
        wait_until(lambda: all(each.is_exact for each in router.context.fleet))
        server.drive(2, COUNTING)
        server.drive(0, OTHER)
        wait_until(lambda: hits(router, COUNTING) == hits(router, OTHER) == [16])
        [backend] = router.context.fleet
        assert [view.hit_tokens(Prompt(pack_tokens([*COUNTING, 99]))) for view in backend.exact.views] == [0, 0, 16]


def streaming(views: EngineViews) -> list[Streamed]:
    engines = [Streamed() for _ in views.views]
    for each, view in zip(engines, views.views):
        view.feed(each.streams.begin(view.feed, each.engine.state))
    return engines


def test_a_request_is_on_its_way_to_the_engine_that_the_server_would_choose() -> None:
    views = EngineViews(2)
    engines, prompt = streaming(views), Prompt(pack_tokens([*COUNTING, 99]))
    engines[1].engine.arrive(COUNTING, max_tokens=2)
    engines[1].engine.run_out()
    views.routed("chat-1", prompt)
    assert [view.candidate(prompt).waiting for view in views.views] == [0, 1]
    assert views.candidate(Prompt(pack_tokens(OTHER)), True).waiting == 0, "the other engine would have it"
    engines[0].engine.arrive([*COUNTING, 99], name="chat-1-7f-0")  # the server decides otherwise
    assert [view.candidate(prompt).waiting for view in views.views] == [1, 0]
    views.done("chat-1")


def test_one_engine_hears_nothing_twice() -> None:
    assert EngineViews(1).views[0].heard is None and isinstance(EngineViews(2).views[1], View)


# ---- decisions -----------------------------------------------------------------------------------------------------


def complete(router: RouterHere, text: str, **more: Any) -> int:
    return router.call("POST", "/v1/completions", {"model": "toy", "prompt": text, "max_tokens": 1} | more)[0]


def test_decisions_are_recorded_and_made_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with Toy() as first, Toy() as second, Toy() as third:
        for policy in ("prefix", "consistent_hash"):
            settings = {"decisions_dir": str(tmp_path), "routing_policy": policy, "admin_key": "k"}
            with RouterHere(first.url, second.url, **settings) as router:
                for number in range(8):
                    assert complete(router, f"{number % 3} the sea " * 40, user=f"secret {number % 3}") == 200
                if policy == "prefix":
                    admin = {"Authorization": "Bearer k"}
                    assert router.call("DELETE", f"/router/backends?backend={first.url}", **admin)[0] == 200
                    assert router.call("POST", f"/router/backends?backend={third.url}", **admin)[0] == 200
                    assert complete(router, "the wind " * 40) == 200
    files = [read(path.read_bytes()) for path in files_of(tmp_path)]
    assert [each.header.policy for each in files] == ["prefix"] * 2 + ["consistent_hash"]
    assert [each.header.replicas for each in files] == [(first.url, second.url), (third.url, second.url), (first.url, second.url)]
    assert not any(b"secret" in path.read_bytes() or b"the sea" in path.read_bytes() for path in files_of(tmp_path))
    capsys.readouterr()
    assert main(["route", str(tmp_path), "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["decisions"] == 17 and answer["differing"] == 0 and answer["unrouted"] == 0
    assert {each["name"]: each["requests"] for each in answer["replicas"]}.keys() == {first.url, second.url, third.url}
    assert sum(each["requests"] for each in answer["replicas"]) == 17 and answer["hit_tokens"] > 0
    assert main(["route", str(tmp_path)]) == 0


def test_a_router_goes_on_behind_the_files_of_its_predecessor(tmp_path: Path) -> None:
    for number in range(6):
        header = Header(format_version=FORMAT_VERSION, code_version=str(number), policy="prefix", replicas=(), started_ns=0)
        DecisionFile(tmp_path, header, "9000", files_max=4).close()
    DecisionFile(tmp_path, header, "900").close()
    assert [path.name for path in files_of(tmp_path)][:2] == ["decisions-900-000000.vnextroutes", "decisions-9000-000002.vnextroutes"]
    assert [read(path.read_bytes()).header.code_version for path in files_of(tmp_path)[1:]] == ["2", "3", "4", "5"]
