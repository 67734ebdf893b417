"""Images encoded by one server, prompts computed by a second, answers by a third: the same tokens, whichever of them ends."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from serving import Server, eventually, serving

from tests.media.test_served_images import FIXED, PIXELS, reader, right, seen

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


def test_vectors_go_from_the_server_that_encodes_to_the_others(reader: Reader, servers: Servers) -> None:
    found, router = servers
    answer = answered(router, PIXELS)
    computed, _ = counts(found["encode"])
    assert computed > 0 and counts(found["prefill"]) == (0, computed) and counts(found["decode"]) in ((0, 0), (0, computed))
    assert eventually(lambda: found["decode"].metric("vnext_kv_handover_received_total") > 0)
    assert is_right(reader, PIXELS, answer)
    other, before = PIXELS[::-1].copy(), counts(found["decode"])[1]
    for process in found["prefill"].processes:
        process.kill()
    assert router.wait_ready(2) is None
    answer = answered(router, other)
    assert counts(found["decode"]) == (0, before + computed) and is_right(reader, other, answer), "it computes prompts while there is no other"
    for process in found["encode"].processes:
        process.kill()
    third = PIXELS[:, ::-1].copy()
    answer = answered(router, third)
    assert counts(found["decode"]) == (computed, before + computed) and is_right(reader, third, answer), "and encodes, too"
