"""Sounds in chats: answers are transformers', the same sound is a hit, and what is no sound gets one sentence."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import httpx
import msgspec
import numpy as np
import pytest
import torch
from engine_here import llm_here
from test_sounds import wav

from tests.e2e.serving import Server, serving
from tests.models.families.towers.hearing_cases import TEMPLATE, right, save_hearing
from tests.models.families.towers.listener_cases import sounds
from vnext import LLM, SamplingParams
from vnext.media.sounds import sound_of
from vnext.runtime.protocol.sampling_params import InvalidRequest
from vnext.server.answers.parts import AnswerParts
from vnext.server.answers.spoken import Spoken, asked_of
from vnext.server.answers.transcripts import Sent
from vnext.text.answer import Delta
from vnext.text.template import ChatTemplate

SOUNDS = [wav(each[:length, None], 1, 16) for each, length in zip(sounds(2, seed=3), (16_000, 9_999))]
COUNT = 12
FIXED = {"max_tokens": COUNT, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
MUTATIONS = 150


@pytest.fixture(scope="module")
def hearing(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, torch.nn.Module]:
    path = tmp_path_factory.mktemp("towers") / "hearing"
    return path, save_hearing(path)


@pytest.fixture(scope="module")
def server(hearing: tuple[Path, torch.nn.Module], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(tmp_path_factory.mktemp("logs"), str(hearing[0]), "--dtype", "float32", "--block-size", "4") as found:
        yield found


def asked(server: Server, content: object, **more: Any) -> dict[str, Any]:
    body = {"messages": [{"role": "user", "content": content}], **FIXED, **more}
    return httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=60).json()


def part(data: bytes) -> dict[str, Any]:
    return {"type": "input_audio", "input_audio": {"data": base64.b64encode(data).decode(), "format": "wav"}}


def heard(*data: bytes, text: str = "d3 e4") -> list[dict[str, Any]]:
    return [*map(part, data), {"type": "text", "text": text}]


def test_a_chat_hears_its_sounds(server: Server, hearing: tuple[Path, torch.nn.Module]) -> None:
    for data in (SOUNDS[:1], SOUNDS, SOUNDS[1:]):
        answer = asked(server, heard(*data), logprobs=True)
        sounds_read = [sound_of(each, "file") for each in data]
        expected, logprobs = right(hearing[1], answer["prompt_token_ids"], sounds_read, COUNT)
        choice = answer["choices"][0]
        assert choice["token_ids"] == expected
        assert [each["logprob"] for each in choice["logprobs"]["content"]] == pytest.approx(logprobs.tolist(), rel=1e-4, abs=1e-4)


def test_the_responses_api_hears_sounds_and_goes_on_from_them(server: Server) -> None:
    sound = part(SOUNDS[0])
    said: dict[str, Any] = {"role": "user", "content": [sound, {"type": "input_text", "text": "d3 e4"}]}
    fixed = {"max_output_tokens": COUNT, "temperature": 0, "ignore_eos": True}

    def answered(**body: Any) -> dict[str, Any]:
        return httpx.post(f"{server.url}/v1/responses", json=fixed | body, timeout=60).json()

    first = answered(input=[said], store=True)
    right = asked(server, heard(SOUNDS[0]))["choices"][0]["message"]["content"]
    assert first["output"][0]["content"][0]["text"] == right
    later = answered(input=[{"role": "user", "content": [sound]}], previous_response_id=first["id"])
    whole = answered(input=[said, {"role": "assistant", "content": right}, {"role": "user", "content": [sound]}])
    assert later["output"][0]["content"] == whole["output"][0]["content"]
    assert later["usage"]["input_tokens"] == whole["usage"]["input_tokens"] > 2 * 25
    for wrong, sentence in (
        ({"type": "input_audio"}, "input[0].content[0].input_audio is missing: send it with its data in base64."),
        ({"type": "input_audio", "input_audio": {"data": "%%"}}, "input_audio is no base64: "),
        ({"type": "input_image", "image_url": "data:x"}, "input[0].content[0].type is 'input_image': this model does not read it here"),
    ):
        assert answered(input=[{"role": "user", "content": [wrong]}])["error"]["message"].startswith(sentence)


def test_the_same_sound_is_a_hit_whatever_its_file_and_another_one_is_none(server: Server) -> None:
    def cached(data: bytes) -> tuple[int, int]:
        usage = asked(server, heard(data, text="g6"))["usage"]
        return usage["prompt_tokens_details"]["cached_tokens"], usage["prompt_tokens"]

    samples = np.roll(sounds(1, seed=8)[0], 5)
    changed = samples.copy()
    changed[3_000] = -changed[3_000]
    first, length = cached(wav(samples[:, None], 1, 16))
    hit, _ = cached(wav(np.stack((samples, samples), 1), 1, 16))
    assert hit >= length - 4 > first and cached(wav(changed[:, None], 1, 16))[0] == first


def test_the_template_counts_sounds_as_the_processor_s_does() -> None:
    template = ChatTemplate(TEMPLATE, {})
    template.mark_media({"audio": "<|A|>"})
    talk = [{"role": "user", "content": "<|A|>what<|A|>is"}, {"role": "assistant", "content": "it"}, {"role": "user", "content": "<|A|>"}]
    parts = [[{"type": "audio"}, {"type": "text", "text": "what"}, {"type": "audio"}, {"type": "text", "text": "is"}], "it", [{"type": "audio"}]]
    plain = ChatTemplate(TEMPLATE, {}).render([{**each, "content": own} for each, own in zip(talk, parts)], {})
    assert template.render(talk, {}) == plain and "Audio 3: <|audio_bos|><|AUDIO|><|audio_eos|>" in plain


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ([part(b"")], "input_audio is no plain WAV file, and what reads others is missing here: send WAV, or pip install 'vnext[audio]'."),
        ([part(SOUNDS[0][:30])], "input_audio is no whole WAV file: it lacks its format or its samples."),
        ([part(wav(np.zeros((100, 1)), 1, 16))], "input_audio has 0.01 seconds: the model reads 0.16 at least."),
        ([part(wav(np.zeros((16_320, 1)), 1, 16))], "input_audio has 1.0 seconds: the model reads 1 at once, give its parts."),
        ([{"type": "input_audio", "input_audio": {"data": "%%%%"}}], "input_audio is no base64: "),
        ([{"type": "image_url"}, part(SOUNDS[0])], "type is 'image_url': this server reads text and sounds, leave it out."),
        ([{"type": "input_audio"}], "input_audio is missing: it is required."),
        ([{"type": "audio_url", "audio_url": {"url": "http://127.0.0.1/x.wav"}}],
         "audio_url is an address of the web, which this server does not read: send it as a data URL."),
        ([{"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}],
         "image_url is an image, and this model reads sounds only."),
    ],
)  # fmt: skip
def test_what_is_no_sound_gets_a_sentence(server: Server, content: object, sentence: str) -> None:
    found = asked(server, content)["error"]["message"]
    if "is missing here" in sentence and "is missing here" not in found:
        sentence = "input_audio is no sound that can be read: send WAV, FLAC, Ogg, MP3, M4A or WebM."
    assert found.startswith(f"messages[0].content[0].{sentence}")


def test_a_mark_too_many_gets_a_sentence(server: Server) -> None:
    message = asked(server, heard(SOUNDS[0], text="<|AUDIO|>"))["error"]["message"]
    assert message == "the prompt has 2 times <|AUDIO|> and 1 sounds: they must be as many."
    message = asked(server, heard(SOUNDS[0]), mm_processor_kwargs={"fps": 2})["error"]["message"]
    assert message.endswith("input_audio is read in one way only: leave mm_processor_kwargs and media_io_kwargs out.")


def test_mutated_sounds_get_an_answer_or_a_sentence(server: Server) -> None:
    draw, found = np.random.default_rng(7), {200: 0, 400: 0}
    for _ in range(MUTATIONS):
        data = bytearray(SOUNDS[1][: int(draw.integers(40, 19_000))])
        for at in draw.integers(0, 60, int(draw.integers(0, 4))):
            data[int(at) % len(data)] = int(draw.integers(0, 256))
        body = {"messages": [{"role": "user", "content": heard(bytes(data))}], "max_tokens": 1}
        answer = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=60)
        found[answer.status_code] += 1
        assert answer.status_code == 200 or answer.json()["error"]["message"].count(". ") == 0
    assert min(found.values()) > 5, found


def test_other_doors_say_what_the_model_reads(server: Server) -> None:
    shown = httpx.post(f"{server.url}/api/show", json={"model": "hearing"}).json()
    assert "vision" not in shown["capabilities"]
    source = {"type": "base64", "media_type": "image/png", "data": "AAAA"}
    body = {"messages": [{"role": "user", "content": [{"type": "image", "source": source}]}], "max_tokens": 1}
    assert httpx.post(f"{server.url}/v1/messages", json=body, timeout=60).status_code == 200, "as of a model that reads text only"


def transcribed(server: Server, data: bytes = SOUNDS[0], door: str = "transcriptions", **fields: str) -> httpx.Response:
    files = {"file": ("a.wav", data, "audio/wav")}
    return httpx.post(f"{server.url}/v1/audio/{door}", files=files, data=fields, timeout=60)


@pytest.mark.parametrize(
    ("door", "fields", "words"),
    [
        ("transcriptions", {}, "Transcribe the input speech."),
        ("transcriptions", {"language": "de", "prompt": "d3 e4"}, "Transcribe the input speech. It is in German. d3 e4"),
        ("translations", {"temperature": "0.7", "seed": "5"}, "Translate the input speech into English."),
    ],
)
def test_transcripts_are_the_answers_of_a_chat(server: Server, door: str, fields: dict[str, str], words: str) -> None:
    body = {"messages": [{"role": "user", "content": heard(SOUNDS[0], text=words)}], "temperature": 0, "logprobs": True}
    body |= {"temperature": 0.7, "seed": 5} if "seed" in fields else {}
    right = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=60).json()
    text, usage = right["choices"][0]["message"]["content"].strip(), right["usage"]
    found = transcribed(server, door=door, **fields, **{"include[]": "logprobs"}).json()
    kept = [each for each in found["logprobs"] if each["bytes"]]
    assert found["text"] == text and [each["logprob"] for each in kept] == [
        each["logprob"] for each in right["choices"][0]["logprobs"]["content"][: len(kept)]
    ]
    assert found["usage"] == {
        "type": "tokens", "input_tokens": usage["prompt_tokens"], "output_tokens": usage["completion_tokens"],
        "total_tokens": usage["total_tokens"],
    }  # fmt: skip
    assert transcribed(server, door=door, **fields, response_format="text").text == text + "\n"
    events = [line[6:] for line in transcribed(server, door=door, stream="true", **fields).text.split("\n\n") if "{" in line]
    *deltas, done = map(msgspec.json.decode, events)
    assert "".join(each["delta"] for each in deltas) == done["text"] == text and len(deltas) > 2


@pytest.mark.parametrize(
    ("data", "fields", "sentence"),
    [
        (SOUNDS[0], {"response_format": "srt"}, "response_format is srt: the model here tells no times, take json or text."),
        (wav(np.zeros((100, 1)), 1, 16), {}, "file has 0.01 seconds: the model reads 0.16 at least."),
        (wav(np.zeros((16_320, 1)), 1, 16), {}, "file has 1.0 seconds: the model reads 1 at once, give its parts."),
    ],
)
def test_what_such_a_model_cannot_write_down_gets_a_sentence(server: Server, data: bytes, fields: dict[str, str], sentence: str) -> None:
    answer = transcribed(server, data, **fields)
    assert (answer.status_code, answer.json()["error"]["message"]) == (400, sentence)


MARKED = [
    (["language En", "glish<asr_te", "xt>Hi,", " you"], "Hi, you"), (["language None<asr_text>"], ""), (["langu", "or"], "languor"),
    (["la", "n"], "lan"), (["language " + "x" * 80, "y"], "language " + "x" * 80 + "y"),
]  # fmt: skip


@pytest.mark.parametrize(("pieces", "text"), MARKED)
def test_the_language_before_a_mark_is_no_part_of_a_transcript(pieces: list[str], text: str) -> None:
    shown: list[str] = []
    reader = Spoken(AnswerParts(None), True, Sent(lambda words: shown.append(words) is None))
    for place, piece in enumerate(pieces, 1):
        finish = "stop" if place == len(pieces) else ""
        reader.delta(
            Mock(), Delta(text=piece, tokens=(), offsets=(), logprobs=(), token_ids=(), token_count=place, finish=finish)
        )
    assert "".join(shown) == reader.words == text


def test_a_model_that_marks_transcripts_is_asked_without_words() -> None:
    def asked(language: str | None, prompt: str = "", task: str = "transcribe") -> list[tuple[str, object]]:
        return [(each.role, each.content) for each in asked_of(b"x", task, language, prompt, is_marked=True)]

    assert [role for role, _ in asked(None)] == ["user"] and asked("English") == asked("EN")
    assert [asked("en", "Ada")[at] for at in (0, 2)] == [("system", "Ada"), ("assistant", "language English<asr_text>")]
    with pytest.raises(InvalidRequest, match="^language is 'xx': it must be one of ar, cs"):
        asked("xx")
    with pytest.raises(InvalidRequest, match="translates nothing: take /v1/audio/transcriptions"):
        asked("en", task="translate")


def test_a_program_gives_sounds_in_any_form(server: Server, hearing: tuple[Path, torch.nn.Module]) -> None:
    greedy, text = SamplingParams(temperature=0, max_tokens=COUNT, ignore_eos=True), {"type": "text", "text": "d3 e4"}
    expected = asked(server, heard(SOUNDS[0]))
    address = "data:audio/wav;base64," + base64.b64encode(SOUNDS[0]).decode()
    samples = sound_of(SOUNDS[0], "file")
    with llm_here(hearing[0], dtype="float32", block_size=4) as llm:
        forms = (
            part(SOUNDS[0]), {"type": "audio_url", "audio_url": {"url": address}}, {"type": "audio", "audio": SOUNDS[0]},
            {"type": "audio", "audio": (samples, 16_000)},
        )  # fmt: skip
        for answer in llm.chat([[{"role": "user", "content": [each, text]}] for each in forms], greedy):
            assert answer.prompt_token_ids == expected["prompt_token_ids"]
            assert list(answer.outputs[0].token_ids) == expected["choices"][0]["token_ids"]
        with pytest.raises(InvalidRequest, match=r"content\[0\].audio is no sound: give a file's bytes, or"):
            llm.chat([{"role": "user", "content": [{"type": "audio", "audio": 3}, text]}], greedy)
    with LLM() as llm, pytest.raises(InvalidRequest, match="^This model reads no sounds: leave them out"):
        llm.generate({"prompt": "a", "multi_modal_data": {"audio": SOUNDS[0]}})
