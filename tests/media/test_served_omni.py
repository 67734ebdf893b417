"""Images and sounds in one message of a chat over HTTP, by Qwen2.5-Omni's thinker: answers are transformers', in any order, streamed
or not, and what was sent before is a hit up to the first thing that differs."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from test_served_hearing import part
from test_served_images import address_of
from test_sounds import wav

from tests.e2e.serving import Server, serving
from tests.models.families.towers.listener_cases import sounds
from tests.models.families.towers.omni_cases import AUDIO, right, save_omni
from tests.models.families.towers.seeing_cases import IMAGE
from vnext.media.sounds import sound_of

COUNT = 12
FIXED = {"max_tokens": COUNT, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
RNG = np.random.default_rng(6)
PICTURES = [RNG.integers(0, 256, (*size, 3), dtype=np.uint8) for size in ((40, 61), (90, 33))]
SOUNDS = [wav(each[:length, None], 1, 16) for each, length in zip(sounds(2, seed=7), (16_000, 9_999))]
ORDERS = ("is", "si", "sis", "iis")


@pytest.fixture(scope="module")
def omni(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    path = tmp_path_factory.mktemp("towers") / "omni"
    return path, save_omni(path)


@pytest.fixture(scope="module")
def server(omni: tuple[Path, Any], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(tmp_path_factory.mktemp("logs"), str(omni[0]), "--dtype", "float32", "--block-size", "4") as found:
        yield found


def content(order: str) -> list[dict[str, Any]]:
    """Images and sounds in this order, and a text behind them."""
    pictures, heard = iter(PICTURES), iter(SOUNDS)
    media = [{"type": "image_url", "image_url": {"url": address_of(next(pictures))}} if kind == "i" else part(next(heard)) for kind in order]
    return [*media, {"type": "text", "text": "d3 e4"}]


def body(said: object, **more: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": said}], **FIXED, **more}


def asked(server: Server, said: object, **more: Any) -> dict[str, Any]:
    return httpx.post(f"{server.url}/v1/chat/completions", json=body(said, **more), timeout=60).json()


@pytest.mark.parametrize("order", ORDERS)
def test_a_chat_has_images_and_sounds_in_any_order(server: Server, omni: tuple[Path, Any], order: str) -> None:
    answer = asked(server, content(order), logprobs=True)
    tokens = answer["prompt_token_ids"]
    kinds = [token for before, token in zip([-1, *tokens], tokens) if token in (IMAGE, AUDIO) and token != before]
    assert kinds == [{"i": IMAGE, "s": AUDIO}[kind] for kind in order]
    heard = [sound_of(each, "file") for each in SOUNDS[: order.count("s")]]
    expected, logprobs = right(omni[1], tokens, PICTURES[: order.count("i")], heard, COUNT)
    [choice] = answer["choices"]
    assert choice["token_ids"] == expected
    assert [each["logprob"] for each in choice["logprobs"]["content"]] == pytest.approx(logprobs.tolist(), rel=0, abs=1e-4)


def test_a_stream_is_the_same_answer(server: Server) -> None:
    whole, text = asked(server, content("is"))["choices"][0]["message"]["content"], ""
    with httpx.stream("POST", f"{server.url}/v1/chat/completions", json=body(content("is"), stream=True), timeout=60) as found:
        for line in found.iter_lines():
            if line.startswith("data: {"):
                text += "".join(each["delta"].get("content") or "" for each in json.loads(line[6:])["choices"])
    assert text == whole != ""


def test_what_was_sent_before_is_a_hit_up_to_what_differs(server: Server) -> None:
    def cached(picture: np.ndarray, sound: np.ndarray) -> tuple[int, list[int]]:
        media = [{"type": "image_url", "image_url": {"url": address_of(picture)}}, part(wav(sound[:, None], 1, 16))]
        answer = asked(server, media)
        return answer["usage"]["prompt_tokens_details"]["cached_tokens"], answer["prompt_token_ids"]

    picture, sound = RNG.integers(0, 256, (40, 61, 3), dtype=np.uint8), np.roll(sounds(1, seed=8)[0], 5)
    other_picture, other_sound = picture.copy(), sound.copy()
    other_picture[7, 9, 1] ^= 255
    other_sound[3_000] = -other_sound[3_000]
    none, tokens = cached(picture, sound)
    first_sound = tokens.index(AUDIO)
    assert none <= tokens.index(IMAGE) and cached(picture, sound)[0] >= len(tokens) - 4
    assert tokens.index(IMAGE) + tokens.count(IMAGE) - 4 < cached(picture, other_sound)[0] <= first_sound
    assert cached(other_picture, sound)[0] <= tokens.index(IMAGE), "the same sound behind another image is another one"


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        ({"type": "image_url", "image_url": {"url": f"data:image/png;base64,{base64.b64encode(SOUNDS[0]).decode()}"}},
         "messages[0].content[1].image_url is no image that can be read"),
        ({"type": "input_audio", "input_audio": {"data": address_of(PICTURES[0]).partition(",")[2], "format": "wav"}},
         "messages[0].content[1].input_audio is no "),
        ({"type": "video_url", "video_url": {"url": address_of(PICTURES[0])}}, "messages[0].content[1]"),
    ],
)  # fmt: skip
def test_one_that_cannot_be_read_is_named(server: Server, wrong: dict[str, Any], sentence: str) -> None:
    message = asked(server, [content("s")[0], wrong])["error"]["message"]
    assert sentence in message and "\n" not in message
