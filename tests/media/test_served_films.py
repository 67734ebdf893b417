"""A video through the doors: the chat's answer is the one that `LLM` gives, the same video is a hit, and what is none gets one sentence."""

from __future__ import annotations

import base64
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from engine_here import llm_here

from tests.e2e.serving import Server, serving
from tests.media.test_films import written
from tests.models.families.towers.seeing_cases import save_seeing
from tests.models.families.towers.tower_cases import save_reader
from vnext import SamplingParams
from vnext.runtime.protocol.sampling_params import InvalidRequest

SHOWN = "<|vision_start|><|video_pad|><|vision_end|>"
FIXED = {"max_tokens": 12, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
GREEDY = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("films") / "nets"
    save_seeing(found, "nets")
    return found


@pytest.fixture(scope="module")
def server(path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(tmp_path_factory.mktemp("logs"), str(path), "--dtype", "float32", "--block-size", "4") as found:
        yield found


def asked(server: Server, address: str, text: str = "d3 e4", /, *, of_video: Mapping[str, Any] = {}, **more: Any) -> dict[str, Any]:
    content = [{"type": "video_url", "video_url": {"url": address, **of_video}}, {"type": "text", "text": text}]
    body = {"messages": [{"role": "user", "content": content}], **FIXED, **more}
    return httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=60).json()


def address_of(data: bytes) -> str:
    return "data:video/mp4;base64," + base64.b64encode(data).decode()


def test_a_chat_sees_its_video(server: Server, path: Path) -> None:
    data = written()
    first, again = asked(server, address_of(data)), asked(server, address_of(data))
    answer = first["choices"][0]["token_ids"]
    assert again["choices"][0]["token_ids"] == answer and again["usage"]["prompt_tokens_details"]["cached_tokens"] > 8
    with llm_here(path, dtype="float32", block_size=4) as llm:
        talk = [{"role": "user", "content": [{"type": "video", "video": data}, {"type": "text", "text": "d3 e4"}]}]
        [chatted] = llm.chat(talk, GREEDY, use_tqdm=False)
        prompt = {"prompt": f"<bos> user {SHOWN}d3 e4 <eos> ", "multi_modal_data": {"video": data}}
        [generated] = llm.generate(prompt, GREEDY, use_tqdm=False)
        with pytest.raises(InvalidRequest, match=r"^the prompt has 0 times .* and 1 videos: they must be as many\.$"):
            llm.generate({**prompt, "prompt": "d3"}, GREEDY, use_tqdm=False)
    assert list(chatted.prompt_token_ids) == first["prompt_token_ids"]
    assert list(chatted.outputs[0].token_ids) == list(generated.outputs[0].token_ids) == answer


def test_a_chat_says_how_its_video_is_read(server: Server) -> None:
    address = address_of(written())
    lengths = [asked(server, address, **more)["usage"]["prompt_tokens"] for more in (
        {}, {"mm_processor_kwargs": {"num_frames": 4}}, {"media_io_kwargs": {"video": {"num_frames": 8}}}, {"mm_processor_kwargs": {"fps": 10}},
    )]  # fmt: skip
    assert lengths[0] == lengths[1] < lengths[2] < lengths[3], "two seconds of ten frames, of which two a second are read"
    for more, name in (
        ({"mm_processor_kwargs": {"num_crops": 4}}, "mm_processor_kwargs.num_crops"),
        ({"of_video": {"fps": 1}}, "messages[0].content[0].video_url.fps"),
    ):
        error = asked(server, address, **more)["error"]
        assert error["param"] == name and error["message"].startswith(f"{name} is not supported: send ")


@pytest.mark.parametrize(
    ("address", "sentence"),
    [
        (address_of(b"abc"), "is no video that can be read: it must be MP4, WebM, Matroska, AVI, GIF."),
        ("http://127.0.0.1/x.mp4", "is an address of the web, which this server does not read: send it as a data URL."),
        ("file:///etc/passwd", "is a file here, which is not read: send it as a data URL."),
    ],
)
def test_what_is_no_video_gets_one_sentence(server: Server, address: str, sentence: str) -> None:
    pytest.importorskip("av", reason="PyAV is missing: pip install 'vnext[video]'")
    name = "messages[0].content[0].video_url"
    assert asked(server, address)["error"] | {"type": "", "code": None} == {
        "message": f"{name} {sentence}", "param": name, "type": "", "code": None,
    }  # fmt: skip


def test_files_below_a_folder_and_the_web_are_read_where_allowed(server: Server, path: Path, tmp_path: Path) -> None:
    (tmp_path / "a film.mp4").write_bytes(data := written())
    allowed = ("--allowed-local-media-path", str(tmp_path), "--allowed-media-domains", "127.0.0.1")
    with serving(tmp_path, str(path), "--dtype", "float32", "--block-size", "4", *allowed) as opened:
        named = asked(opened, f"file://{tmp_path}/a%20film.mp4")
        assert named["choices"][0]["token_ids"] == asked(server, address_of(data))["choices"][0]["token_ids"]
        for address, words in (
            ("file:///etc/passwd", "is no file below the folder that may be read"), ("http://127.0.0.1:9/a", "leads to a private address"),
            ("http://else.example/a", "leads to else.example, and this server reads 127.0.0.1"),
        ):  # fmt: skip
            assert words in asked(opened, address)["error"]["message"]


def test_a_model_that_reads_images_alone_says_so(tmp_path: Path) -> None:
    save_reader(tmp_path)
    with llm_here(tmp_path, dtype="float32", block_size=4) as llm:
        with pytest.raises(InvalidRequest, match="is a video, and this model reads images only"):
            llm.generate({"prompt": "<image> d3", "multi_modal_data": {"video": (np.zeros((2, 32, 32, 3), np.uint8), 1.0)}}, GREEDY)
