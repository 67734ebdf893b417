"""An image through the doors: answers are transformers', the same image is a hit, and what is no image gets one sentence."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from engine_here import llm_here
from PIL import Image

from tests.e2e.serving import Server, serving
from tests.models.families.towers.tower_cases import TILE_TOKENS, save_reader
from vnext import LLM, SamplingParams
from vnext.media.pixels import numbers_of
from vnext.media.tiles import tile_form, tiles_of
from vnext.runtime.protocol.sampling_params import BeamSearchParams, InvalidRequest

PIXELS = np.random.default_rng(5).integers(0, 256, (40, 60, 3), dtype=np.uint8)
COUNT = 12
FIXED = {"max_tokens": COUNT, "temperature": 0, "ignore_eos": True, "return_token_ids": True}


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, torch.nn.Module]:
    path = tmp_path_factory.mktemp("towers") / "reader"
    return path, save_reader(path)


@pytest.fixture(scope="module")
def server(reader: tuple[Path, torch.nn.Module], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(tmp_path_factory.mktemp("logs"), str(reader[0]), "--dtype", "float32", "--block-size", "4") as found:
        yield found


def file_of(pixels: np.ndarray) -> bytes:
    written = BytesIO()
    Image.fromarray(pixels).save(written, "PNG")
    return written.getvalue()


def address_of(pixels: np.ndarray) -> str:
    return "data:image/png;base64," + base64.b64encode(file_of(pixels)).decode()


def asked(server: Server, content: object, **more: Any) -> dict[str, Any]:
    body = {"messages": [{"role": "user", "content": content}], **FIXED, **more}
    return httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=60).json()


def seen(pixels: np.ndarray, text: str = "d3 e4") -> list[dict[str, Any]]:
    return [{"type": "image_url", "image_url": {"url": address_of(pixels)}}, {"type": "text", "text": text}]


def right(reader: tuple[Path, torch.nn.Module], tokens: list[int], *images: np.ndarray) -> tuple[list[int], list[float]]:
    """The tokens that transformers answers with greedily, and the log-probability of each."""
    form = tile_form(json.loads((reader[0] / "preprocessor_config.json").read_text()), TILE_TOKENS)
    pixels = np.concatenate([numbers_of(tiles_of(each, form, "").pixels, form.pixels) for each in images])
    with torch.inference_mode():
        found = reader[1].generate(
            input_ids=torch.tensor([tokens]), pixel_values=torch.from_numpy(pixels)[None], max_new_tokens=COUNT, do_sample=False,
            eos_token_id=None, output_logits=True, return_dict_in_generate=True,
        )  # fmt: skip
    answer = found.sequences[0, len(tokens) :].tolist()
    return answer, [float(each[0].log_softmax(-1)[token]) for each, token in zip(found.logits, answer)]


def test_a_chat_sees_its_images(server: Server, reader: tuple[Path, torch.nn.Module]) -> None:
    other = PIXELS[::-1, ::-1].copy()
    for content, images in ((seen(PIXELS), [PIXELS]), ([*seen(other), *seen(PIXELS, "f5")], [other, PIXELS])):
        answer = asked(server, content, logprobs=True)
        tokens, choice = answer["prompt_token_ids"], answer["choices"][0]
        expected, logprobs = right(reader, tokens, *images)
        assert choice["token_ids"] == expected
        assert [each["logprob"] for each in choice["logprobs"]["content"]] == pytest.approx(logprobs, rel=1e-4, abs=1e-4)
        assert answer["usage"]["prompt_tokens"] == len(tokens) > 5 * TILE_TOKENS * len(images)


def test_beams_see_their_images(server: Server, reader: tuple[Path, torch.nn.Module]) -> None:
    answer = asked(server, seen(PIXELS), use_beam_search=True, beam_width=1)
    assert answer["choices"][0]["token_ids"] == right(reader, answer["prompt_token_ids"], PIXELS)[0]
    with llm_here(reader[0], dtype="float32", block_size=4) as llm:
        prompt = {"prompt": "<image> d3 e4", "multi_modal_data": {"image": PIXELS}}
        [plain] = llm.generate(prompt, SamplingParams(temperature=0, max_tokens=COUNT, ignore_eos=True))
        [found] = llm.beam_search([prompt], BeamSearchParams(beam_width=1, max_tokens=COUNT, ignore_eos=True))
    assert found.outputs[0].token_ids == plain.outputs[0].token_ids


def test_the_same_image_is_a_hit_for_its_tenant_and_one_pixel_changes_all_behind(server: Server) -> None:
    def cached(pixels: np.ndarray, salt: str | None = None) -> tuple[int, int]:
        usage = asked(server, seen(pixels, "g6"), cache_salt=salt)["usage"]
        return usage["prompt_tokens_details"]["cached_tokens"], usage["prompt_tokens"]

    image = np.roll(PIXELS, 7, axis=0)
    changed = image.copy()
    changed[0, 0] ^= 255
    assert cached(image)[0] <= 4  # the first tile is behind four tokens
    hit, length = cached(image)
    assert hit >= length - 4 and cached(changed)[0] <= 4
    assert cached(image, "another tenant's")[0] == 0 and cached(image, "another tenant's")[0] == hit


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ([{"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}],
         "messages[0].content[0].image_url is no image that can be read: it must be PNG, JPEG, WEBP, GIF, BMP, AVIF."),
        ([{"type": "image_url", "image_url": {"url": "http://127.0.0.1/x.png"}}],
         "messages[0].content[0].image_url is an address of the web, which this server does not read: send it as a data URL."),
        ([{"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}],
         "messages[0].content[0].image_url is a file here, which is not read: send it as a data URL."),
        ([{"type": "image_url"}], "messages[0].content[0].image_url is missing: it is required."),
        ([{"type": "input_audio"}], "messages[0].content[0].type is 'input_audio': this server reads text and images, leave it out."),
        ([*seen(PIXELS), {"type": "text", "text": "<image>"}],
         "the prompt has 2 times <image> and 1 images: they must be as many."),
    ],
)  # fmt: skip
def test_what_is_no_image_gets_a_sentence(server: Server, content: object, sentence: str) -> None:
    assert asked(server, content)["error"]["message"] == sentence


def test_other_doors_see_the_same_image(server: Server) -> None:
    right = asked(server, seen(PIXELS))["choices"][0]["message"]["content"]
    address = address_of(PIXELS)

    def of(route: str, **body: Any) -> dict[str, Any]:
        fixed = {"temperature": 0, "ignore_eos": True} if route == "responses" else {"temperature": 0}
        return httpx.post(f"{server.url}/v1/{route}", json=fixed | body, timeout=60).json()

    parts = [{"type": "input_image", "image_url": address}, {"type": "input_text", "text": "d3 e4"}]
    answer = of("responses", input=[{"role": "user", "content": parts}], max_output_tokens=COUNT)
    assert answer["output"][0]["content"][0]["text"] == right
    source = {"type": "base64", "media_type": "image/png", "data": address.partition(",")[2]}
    blocks = [{"type": "image", "source": source}, {"type": "text", "text": "d3 e4"}]
    answer = of("messages", messages=[{"role": "user", "content": blocks}], max_tokens=COUNT)
    assert right.startswith(answer["content"][0]["text"]) and answer["usage"]["input_tokens"] + answer["usage"]["cache_read_input_tokens"] > 80
    wrong = of("responses", input=[{"role": "user", "content": [{"type": "input_image", "image_url": "data:x"}]}])
    assert wrong["error"]["message"] == "input_image is no data URL of the form data:image/png;base64,...."
    wrong = of("messages", messages=[{"role": "user", "content": [{"type": "image", "source": {"type": "file"}}]}], max_tokens=1)
    assert wrong["error"]["message"] == "messages[0].content[0].source is no image: its type must be 'base64' or 'url'."


def test_scores_of_an_image_are_refused(server: Server) -> None:
    assert "prompt_logprobs does not go with images" in asked(server, seen(PIXELS), prompt_logprobs=0)["error"]["message"]


def test_a_prompt_with_an_image_is_not_cut(server: Server) -> None:
    assert "truncate_prompt_tokens does not go with images" in asked(server, seen(PIXELS), truncate_prompt_tokens=20)["error"]["message"]
    whole, uncut = asked(server, seen(PIXELS)), asked(server, seen(PIXELS), truncate_prompt_tokens=-1)
    assert uncut["prompt_token_ids"] == whole["prompt_token_ids"]
    assert uncut["choices"][0]["token_ids"] == whole["choices"][0]["token_ids"]


def test_a_program_gives_images_in_any_form(reader: tuple[Path, torch.nn.Module]) -> None:
    text = "<bos> user <image> d3 e4 <eos>"
    turned = Image.fromarray(np.rot90(PIXELS))
    turned.getexif()[0x0112] = 6
    with llm_here(reader[0], dtype="float32", block_size=4) as llm:
        forms = (PIXELS, Image.fromarray(PIXELS), turned, file_of(PIXELS), address_of(PIXELS))
        prompts = [{"prompt": text, "multi_modal_data": {"image": each}} for each in forms]
        found = llm.generate(prompts, SamplingParams(max_tokens=COUNT, temperature=0, ignore_eos=True), use_tqdm=False)
        assert {tuple(each.outputs[0].token_ids) for each in found} == {tuple(right(reader, found[0].prompt_token_ids, PIXELS)[0])}
        for wrong, sentence in (
            ({"prompt": text, "multi_modal_data": {"image": []}}, "1 times <image> and 0 images"),
            ({"prompt": text, "multi_modal_data": {"image": [b"x"]}}, r"multi_modal_data\['image'\]\[0\] is no image that can be read"),
            ({"prompt": text, "multi_modal_data": {"sound": b"x"}}, "A prompt with multi_modal_data is"),
            ({"prompt": text, "multi_modal_data": {"audio": b"x"}}, r"\['audio'\]\[0\] is a sound, and this model reads images only"),
            ({"prompt_token_ids": [-5]}, "The prompt holds -5"),
        ):
            with pytest.raises(InvalidRequest, match=sentence):
                llm.generate(wrong)
        with pytest.raises(InvalidRequest, match="is for generate"):
            llm.embed(prompts[0])
    with LLM() as llm, pytest.raises(InvalidRequest, match="This model reads no images: leave them out"):
        llm.generate(prompts[0])


# ---- other doors -----------------------------------------------------------------------------------------------------

FORMS: dict[str, Any] = {
    "a data URL": {"type": "image_url", "image_url": {"url": address_of(PIXELS)}},
    "a data URL alone": {"type": "image_url", "image_url": address_of(PIXELS)},
    "Pillow's": {"type": "image", "image": Image.fromarray(PIXELS)},
    "Pillow's, as vLLM has it": {"type": "image_pil", "image_pil": Image.fromarray(PIXELS)},
    "bytes": {"type": "image", "image": file_of(PIXELS)},
    "an array": {"type": "image", "image": PIXELS},
}


def test_a_program_chats_with_images_as_clients_do(server: Server, reader: tuple[Path, torch.nn.Module]) -> None:
    greedy, text = SamplingParams(temperature=0, max_tokens=COUNT, ignore_eos=True), {"type": "text", "text": "d3 e4"}
    right = asked(server, seen(PIXELS))
    other = [{"type": "text", "text": "f5"}, *seen(PIXELS), {"type": "text", "text": "g6"}]
    between = asked(server, other)
    with llm_here(reader[0], dtype="float32", block_size=4) as llm:
        chats = [[{"role": "user", "content": [each, text]}] for each in FORMS.values()]
        found = llm.chat([*chats, [{"role": "user", "content": other}]], greedy)
        for answer in found[:-1]:
            assert answer.outputs[0].text == right["choices"][0]["message"]["content"]
            assert answer.prompt_token_ids == right["prompt_token_ids"]
        assert found[-1].prompt_token_ids == between["prompt_token_ids"]
        assert "".join(llm.stream_chat(chats[0], greedy)) == found[0].outputs[0].text
        wrong = (
            ({"type": "image_url", "image_url": {"url": "/etc/passwd"}}, "image_url has no address that begins with data:, file: or https:"),
            ({"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}, "image_url is a file here, which is not read: send"),
            ({"type": "image_url", "image_url": {"url": "http://127.0.0.1/a"}}, "image_url is an address of the web, which this"),
            ({"type": "image", "image": 3}, "image is no image: give an address, a file's bytes, Pillow's image or"),
            ({"type": "image", "image": b"no image"}, "image is no image that can be read: it must be PNG, JPEG"),
            ({"type": "image"}, "image is missing: it is required."),
            ({"type": "input_file"}, r"""is 'input_file': give {"type": "text", "text": ...}, or an image as "image_url", a sound as "input_audio"."""),
        )
        for part, sentence in wrong:
            with pytest.raises(InvalidRequest, match=rf"^messages\[0\]\.content\[1\].{re.escape(sentence)}"):
                llm.chat([{"role": "user", "content": [text, part]}], greedy)
        with pytest.raises(InvalidRequest, match="the prompt has 2 times <image> and 1 images: they must be as many"):
            llm.chat([{"role": "user", "content": [FORMS["bytes"], {"type": "text", "text": "<image>"}]}], greedy)
    with LLM() as llm, pytest.raises(InvalidRequest, match="^This model reads no images: leave them out"):
        llm.chat(chats[0])


def test_ollamas_clients_show_images(server: Server) -> None:
    right = asked(server, seen(PIXELS))["choices"][0]["message"]["content"]
    image = address_of(PIXELS).partition(",")[2]

    def of(route: str, **body: Any) -> dict[str, Any]:
        options = {"temperature": 0, "num_predict": COUNT}
        return httpx.post(f"{server.url}/api/{route}", json={"stream": False, "options": options, **body}, timeout=60).json()

    chat = of("chat", messages=[{"role": "user", "content": "d3 e4", "images": [image]}])
    assert right.startswith(chat["message"]["content"]) and chat["prompt_eval_count"] > 80
    plain = of("generate", prompt="d3 e4", images=[image])
    assert plain["response"] == chat["message"]["content"] and plain["prompt_eval_count"] == chat["prompt_eval_count"]
    assert of("generate", images=[image])["prompt_eval_count"] > 80
    assert "vision" in of("show", model="reader")["capabilities"]
    assert of("chat", messages=[{"role": "user", "content": "d3", "images": ["AAAA"]}])["error"].startswith("images is no image that")
    assert of("generate", prompt="d3", raw=True, images=[image])["error"] == "images does not go with raw or suffix: leave them out."


def test_tools_results_show_images(server: Server) -> None:
    address, call = address_of(PIXELS), {"id": "call_1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    parts = [{"type": "text", "text": "d3"}, {"type": "image_url", "image_url": {"url": address}}]
    talk = [{"role": "user", "content": "e4"}, {"role": "assistant", "content": "", "tool_calls": [call]}]
    tool = {"role": "tool", "tool_call_id": "call_1", "content": parts}
    body = {"messages": [*talk, tool], **FIXED}
    right = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=60).json()
    words, length = right["choices"][0]["message"]["content"], right["usage"]["prompt_tokens"]
    assert length > 80

    source = {"type": "base64", "media_type": "image/png", "data": address.partition(",")[2]}
    result = {"type": "tool_result", "tool_use_id": "call_1", "content": [parts[0], {"type": "image", "source": source}]}
    messages = [
        talk[0], {"role": "assistant", "content": [{"type": "tool_use", "id": "call_1", "name": "look", "input": {}}]},
        {"role": "user", "content": [result]},
    ]  # fmt: skip
    anthropic = {"messages": messages, "max_tokens": COUNT, "temperature": 0}
    answer = httpx.post(f"{server.url}/v1/messages", json=anthropic, timeout=60).json()
    usage = answer["usage"]
    assert words.startswith(answer["content"][0]["text"]) and usage["input_tokens"] + usage["cache_read_input_tokens"] == length
    counted = httpx.post(f"{server.url}/v1/messages/count_tokens", json={"messages": messages}).json()
    assert counted["input_tokens"] == length
    result["is_error"] = True
    assert httpx.post(f"{server.url}/v1/messages/count_tokens", json={"messages": messages}).json()["input_tokens"] > length

    output = [{"type": "input_text", "text": "d3"}, {"type": "input_image", "image_url": address}]
    items = [
        talk[0], {"type": "function_call", "call_id": "call_1", "name": "look", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "call_1", "output": output},
    ]  # fmt: skip
    body = {"input": items, "max_output_tokens": COUNT, "temperature": 0, "ignore_eos": True}
    answer = httpx.post(f"{server.url}/v1/responses", json=body, timeout=60).json()
    assert answer["output"][0]["content"][0]["text"] == words and answer["usage"]["input_tokens"] == length
