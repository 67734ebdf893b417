"""guidance_scale and negative_prompt at the doors that have them: what the engine is asked, and what is refused in one sentence."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from edge_server import EdgeServer, echo_answer, refuse_marked
from fake_engine import CONFIG, FakeEngine

from vnext.runtime.protocol.messages import SubmitRequest
from vnext.state.events import unpack_tokens

CHAT = {"messages": [{"role": "user", "content": "say:hello there"}], "max_tokens": 3}
DOORS = [("/v1/completions", {"prompt": "say:hello there"}), ("/v1/chat/completions", CHAT)]


@pytest.fixture
def guiding() -> Iterator[EdgeServer]:
    engine = FakeEngine(echo_answer, refuse_marked, config=msgspec.structs.replace(CONFIG, guidance=True))
    with EdgeServer(engine=engine) as server:
        yield server


def asked(server: EdgeServer, path: str, body: dict[str, Any]) -> SubmitRequest:
    status, answer, _ = server.post(path, body)
    assert status == 200, answer
    return server.engine.of_kind(SubmitRequest)[-1]


@pytest.mark.parametrize(("path", "body"), DOORS)
def test_a_negative_prompt_is_read_as_the_prompt_is(guiding: EdgeServer, path: str, body: dict[str, Any]) -> None:
    other = {"prompt": "bad"} if "prompt" in body else {"messages": [{"role": "user", "content": "bad"}]}
    expected = asked(guiding, path, body | other).prompt
    found = asked(guiding, path, body | {"guidance_scale": 2.5, "negative_prompt": "bad"})
    assert found.sampling.guidance.beside == expected and found.sampling.guidance.scale == 2.5
    found = asked(guiding, path, body | {"guidance_scale": 2.5, "negative_prompt": [7, 8]})
    assert unpack_tokens(found.sampling.guidance.beside).tolist() == [7, 8]
    found = asked(guiding, path, body | {"guidance_scale": 2.5})
    assert found.sampling.guidance.beside == found.prompt[-4:], "of a prompt without another one, its last token"
    longer = [7, 8] * len(found.prompt)
    found = asked(guiding, path, body | {"guidance_scale": 2.5, "negative_prompt": longer})
    assert unpack_tokens(found.prompt).tolist() == longer and found.sampling.guidance.is_prompt
    assert found.sampling.guidance.beside == asked(guiding, path, body).prompt
    assert asked(guiding, path, body | {"guidance_scale": 1}).sampling.guidance is None


@pytest.mark.parametrize(("path", "body"), DOORS)
@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        ({"negative_prompt": "bad"}, "negative_prompt is only allowed with a guidance_scale other than 1."),
        ({"guidance_scale": -1}, "guidance_scale is -1.0: it must lie between 0 and 100.0."),
        ({"guidance_scale": 2, "negative_prompt": [7, 9999]}, "negative_prompt[1] is 9999: token ids lie between 0 and 511."),
        ({"guidance_scale": 2, "use_beam_search": True}, "guidance_scale does not go with use_beam_search: leave one of the two out."),
    ],
)
def test_what_is_wrong_is_named(guiding: EdgeServer, path: str, body: dict[str, Any], more: dict[str, Any], sentence: str) -> None:
    status, answer, _ = guiding.post(path, body | more)
    assert (status, answer["error"]["message"]) == (400, sentence)


@pytest.mark.parametrize(("path", "body"), DOORS)
def test_a_server_without_guidance_says_how_to_start_it(server: EdgeServer, path: str, body: dict[str, Any]) -> None:
    status, answer, _ = server.post(path, body | {"guidance_scale": 2})
    assert (status, answer["error"]["message"]) == (400, "guidance_scale: start the server with --enable-guidance, or leave it out.")
