"""Images and sounds encoded by one server, prompts computed by a second, answers by a third: the same, whichever of them ends."""

from __future__ import annotations

import sys
import wave
from collections.abc import Iterator
from contextlib import ExitStack
from io import BytesIO
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from serving import Server, eventually, serving

from tests.media.test_served_images import FIXED, PIXELS, address_of, reader, right, seen
from tests.models.families.towers.listener_cases import save_transcriber, sounds

sys.path.append(str(Path(__file__).parents[1] / "gateway"))

from router_here import RouterHere  # noqa: E402  (needs the path above)

__all__ = ["reader"]
CHAT = "/v1/chat/completions"
Reader = tuple[Path, torch.nn.Module]
Servers = tuple[dict[str, Server], RouterHere]


@pytest.fixture(scope="module", params=["shared memory", "tcp"])
def servers(reader: Reader, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[Servers]:
    folder = tmp_path_factory.mktemp("roles")
    (folder / "secret").write_text("a secret of all servers")
    usual = "--threads", "1", "--dtype", "float32", "--block-size", "4", "--log", "off", "--enable-rl-routes"
    at = ("--handover-address", "127.0.0.2:0", "--handover-transport", "tcp") if request.param == "tcp" else ()
    with ExitStack() as stack:
        found = {}
        for role, more in {"encode": at, "prefill": at, "decode": ()}.items():
            own = *usual, "--cluster-secret-file", str(folder / "secret"), "--role", role, *more
            found[role] = stack.enter_context(serving(folder / role, str(reader[0]), *own))
        yield found, stack.enter_context(RouterHere(*(each.url for each in found.values())))


def counts(server: Server) -> tuple[int, int]:
    """The vectors that its rank has computed and read."""
    answer = httpx.post(f"{server.url}/collective_rpc", json={"method": "encoded"}, timeout=60).raise_for_status().json()
    [found] = answer["results"]
    return found["computed"], found["read"]


def answered(router: RouterHere, pixels: np.ndarray) -> dict[str, Any]:
    status, answer, _ = router.call("POST", CHAT, {"messages": [{"role": "user", "content": seen(pixels)}], **FIXED})
    assert status == 200, answer
    return answer


def is_right(reader: Reader, pixels: np.ndarray, answer: dict[str, Any]) -> bool:
    return bool(answer["choices"][0]["token_ids"] == right(reader, answer["prompt_token_ids"], pixels)[0])


def doors(pixels: np.ndarray) -> list[tuple[str, dict[str, Any], Any]]:
    """(path, body, where its answer has the text) of the APIs that show this image otherwise than a chat."""
    data, limit = address_of(pixels).partition(",")[2], FIXED["max_tokens"]
    blocks = [{"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": data}}, {"type": "text", "text": "d3 e4"}]
    parts = [{"type": "input_image", "image_url": address_of(pixels)}, {"type": "input_text", "text": "d3 e4"}]
    options = {"stream": False, "options": {"temperature": 0, "num_predict": limit}}
    return [
        ("/v1/messages", {"messages": [{"role": "user", "content": blocks}], "max_tokens": limit, "temperature": 0},
         lambda answer: answer["content"][0]["text"]),
        ("/v1/responses", {"input": [{"role": "user", "content": parts}], "max_output_tokens": limit, "temperature": 0},
         lambda answer: answer["output"][0]["content"][0]["text"]),
        ("/api/generate", {"prompt": "d3 e4", "images": [data], **options}, lambda answer: answer["response"]),
    ]  # fmt: skip


def test_every_door_has_its_images_encoded_apart(servers: Servers) -> None:
    found, router = servers
    for at, (path, _, _) in enumerate(doors(PIXELS)):
        pixels = np.roll(PIXELS, 3 + at, axis=1)
        _, body, text = doors(pixels)[at]
        before, others = counts(found["encode"])[0], [counts(found[role])[0] for role in ("prefill", "decode")]
        status, answer, _ = router.call("POST", path, body)
        assert status == 200, answer
        assert counts(found["encode"])[0] > before and [counts(found[role])[0] for role in ("prefill", "decode")] == others, path
        status, alone = httpx.post(f"{found['decode'].url}{path}", json=body, timeout=60), text(answer)
        assert text(status.json()) == alone and alone
    direct = httpx.post(f"{found['encode'].url}{CHAT}", json={"messages": [{"role": "user", "content": seen(PIXELS)}]}, timeout=60)
    assert direct.status_code == 403 and "only encodes images and sounds for others: ask one of another role." in direct.text


def test_vectors_go_from_the_server_that_encodes_to_the_others(reader: Reader, servers: Servers) -> None:
    found, router = servers
    begin = {role: counts(server) for role, server in found.items()}

    def since(role: str) -> tuple[int, int]:
        computed, read = counts(found[role])
        return computed - begin[role][0], read - begin[role][1]

    answer = answered(router, PIXELS)
    computed, _ = since("encode")
    assert computed > 0 and since("prefill") == (0, computed) and since("decode") in ((0, 0), (0, computed))
    assert eventually(lambda: found["decode"].metric("vnext_kv_handover_received_total") > 0)
    assert is_right(reader, PIXELS, answer)
    other, before = PIXELS[::-1].copy(), since("decode")[1]
    for process in found["prefill"].processes:
        process.kill()
    assert router.wait_ready(2) is None
    answer = answered(router, other)
    assert since("decode") == (0, before + computed) and is_right(reader, other, answer), "it computes prompts while there is no other"
    for process in found["encode"].processes:
        process.kill()
    third = PIXELS[:, ::-1].copy()
    answer = answered(router, third)
    assert since("decode") == (computed, before + computed) and is_right(reader, third, answer), "and encodes, too"


def test_sounds_are_encoded_by_one_server_for_the_other(tmp_path: Path) -> None:
    save_transcriber(tmp_path / "model")
    (tmp_path / "secret").write_text("a secret of all servers")
    with wave.open(written := BytesIO(), "wb") as file:
        file.setparams((1, 2, 16_000, 0, "NONE", ""))
        file.writeframes((sounds(1, seed=3)[0] * 32_767).astype("<i2").tobytes())
    with ExitStack() as stack:
        found = {}
        for role in ("encode", "decode"):
            usual = "--threads", "1", "--dtype", "float32", "--block-size", "4", "--log", "off", "--enable-rl-routes", "--role", role
            own = *usual, "--cluster-secret-file", str(tmp_path / "secret")
            found[role] = stack.enter_context(serving(tmp_path / role, str(tmp_path / "model"), *own))
        router = stack.enter_context(RouterHere(*(each.url for each in found.values())))

        def said(url: str) -> str:
            form: dict[str, Any] = {"files": {"file": ("a.wav", written.getvalue())}, "data": {"language": "en", "stream": "true"}}
            return httpx.post(f"{url}/v1/audio/transcriptions", **form, timeout=60).text

        answer = said(router.url)
        computed, _ = counts(found["encode"])
        assert computed > 0 and counts(found["decode"]) == (0, computed)
        assert said(found["decode"].url) == answer and answer and "error" not in answer
