"""A sound through the doors: transcripts are transformers', in every form, and what is no transcription gets one sentence."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
import transformers
from engine_here import engines_here
from test_sounds import wav

from tests.e2e.serving import Server, serving
from tests.models.families.towers.listener_cases import END, PLACES, SAMPLES, SPELLED, TIMES, save_transcriber, sounds
from vnext import LLM, InvalidRequest, SamplingParams
from vnext.media.sounds import sound_of, spectrogram_of
from vnext.server.answers.transcripts import Segment, segments_of

SOUND = wav(sounds(1, seed=3)[0][:, None], 1, 16)
BEGIN, EN, DE, TASK, TRANSLATE, *_, NO_TIMES = [*SPELLED.values()][1:]


@pytest.fixture(scope="module")
def listener(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, torch.nn.Module]:
    path = tmp_path_factory.mktemp("towers") / "listener"
    return path, save_transcriber(path)


@pytest.fixture(scope="module")
def server(listener: tuple[Path, torch.nn.Module], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(tmp_path_factory.mktemp("logs"), str(listener[0]), "--dtype", "float32", "--block-size", "4") as found:
        yield found


def asked(server: Server, data: bytes = SOUND, route: str = "transcriptions", **fields: str) -> httpx.Response:
    files = {"file": ("a.wav", data, "audio/wav")}
    return httpx.post(f"{server.url}/v1/audio/{route}", data=fields, files=files, timeout=60)


def right(model: Any, data: bytes, text: Sequence[int], allowed: Sequence[int] = (), count: int = PLACES) -> list[int]:
    """The tokens that transformers answers with greedily, those that steer left out."""
    features = torch.from_numpy(spectrogram_of(sound_of(data, "file"), 80, SAMPLES))[None]
    tokens, banned = list(text), [id_ for id_ in SPELLED.values() if id_ != END]
    with torch.inference_mode():
        while len(tokens) < min(PLACES, len(text) + count):
            logits = model(input_features=features, decoder_input_ids=torch.tensor([tokens])).logits[0, -1]
            logits[banned if not allowed else [at for at in range(len(logits)) if at not in allowed]] = -torch.inf
            tokens.append(int(logits.argmax()))
            if tokens[-1] == END:
                break
    return [token for token in tokens[len(text) :] if token != END]


def spelled(tokens: Sequence[int]) -> str:
    return "".join(f"{chr(97 + at % 26)}{at}" for at in tokens)


def test_transcripts_are_those_of_transformers(server: Server, listener: tuple[Path, torch.nn.Module]) -> None:
    model = listener[1]
    whole = right(model, SOUND, [BEGIN, EN, TASK, NO_TIMES])
    plain = spelled(token for token in whole if token < TIMES)
    assert asked(server, language="en").json()["text"] == plain and plain
    assert asked(server, language="en", response_format="text").text == plain + "\n"
    heard = right(model, SOUND, [BEGIN], allowed=(EN, DE), count=1)
    assert asked(server).json()["text"] == spelled(t for t in right(model, SOUND, [BEGIN, *heard, TASK, NO_TIMES]) if t < TIMES)
    translated = right(model, SOUND, [BEGIN, EN, TRANSLATE, NO_TIMES])
    assert asked(server, route="translations", language="en").json()["text"] == spelled(t for t in translated if t < TIMES)


def test_what_the_model_suppresses_is_in_no_transcript(listener: tuple[Path, torch.nn.Module], tmp_path: Path) -> None:
    path, model = tmp_path / "listener", listener[1]
    shutil.copytree(listener[0], path)
    prompt, texts = [BEGIN, EN, TASK, NO_TIMES], [token for token in range(TIMES - 1) if token not in SPELLED.values()]
    allowed = [token for token in texts if not right(model, SOUND, prompt, (END, token), 1)][:2]  # the end is likelier
    never = [token for token in range(97) if token not in (END, *allowed)]
    said = {"eos_token_id": END, "suppress_tokens": never, "begin_suppress_tokens": [END]}
    (path / "generation_config.json").write_text(json.dumps(said))
    with serving(tmp_path, str(path), "--dtype", "float32", "--block-size", "4") as server:
        found = asked(server, language="en").json()["text"]
    begun = right(model, SOUND, prompt, allowed, 1)
    assert found == spelled([*begun, *right(model, SOUND, [*prompt, *begun], (END, *allowed))]) and found


def test_times_keep_to_whispers_rules(listener: tuple[Path, torch.nn.Module], tmp_path: Path) -> None:
    """As transformers' own generate; with a first text that is suppressed and a bound on the first time."""
    path, model = tmp_path / "listener", listener[1]
    shutil.copytree(listener[0], path)
    said = {"eos_token_id": END, "begin_suppress_tokens": [END, 7], "max_initial_timestamp_index": 20}
    (path / "generation_config.json").write_text(json.dumps(said))
    config = transformers.GenerationConfig(
        **said, pad_token_id=END, decoder_start_token_id=BEGIN, no_timestamps_token_id=NO_TIMES, is_multilingual=True, max_length=PLACES,
        lang_to_id={"<|en|>": EN, "<|de|>": DE}, task_to_id={"transcribe": TASK, "translate": TRANSLATE}, return_timestamps=True,
        suppress_tokens=[id_ for id_ in SPELLED.values() if id_ != END],
    )  # fmt: skip
    seen = set()
    with serving(tmp_path, str(path), "--dtype", "float32", "--block-size", "4") as server:
        for seed in range(6):
            data = wav(sounds(1, seed=seed)[0][:, None], 1, 16)
            features = torch.from_numpy(spectrogram_of(sound_of(data, "file"), 80, SAMPLES))[None]
            tokens = model.generate(features, generation_config=config, language="en", task="transcribe")[0].tolist()
            again = next((at for at in range(1, len(tokens)) if TIMES <= tokens[at] < max(tokens[:at])), len(tokens))  # the next window
            expected, _ = segments_of(tokens[:again], TIMES, 1.0)
            found = asked(server, data, language="en", response_format="verbose_json").json()["segments"]
            rounded = [Segment(round(each.start_s, 2), round(each.end_s, 2), each.tokens) for each in expected]
            assert [Segment(each["start"], each["end"], each["tokens"]) for each in found[: len(expected)]] == rounded
            seen |= {len(expected), expected[0].start_s}
    assert len(seen) > 3


def test_times_are_in_every_form(server: Server) -> None:
    found = asked(server, language="en", response_format="verbose_json").json()
    assert found["task"] == "transcribe" and found["language"] == "en" and found["duration"] == 1.0 and found["segments"]
    assert all(0 <= each["start"] <= each["end"] <= 1 and each["text"] for each in found["segments"])
    assert "".join(each["text"] for each in found["segments"]) == found["text"]
    assert asked(server, language="en", response_format="srt").text.startswith("1\n00:00:0")
    assert asked(server, language="en", response_format="vtt").text.startswith("WEBVTT\n\n00:00:0")


def test_a_long_sound_is_heard_to_its_end(server: Server) -> None:
    long = np.concatenate(sounds(3, seed=5))[: 5 * SAMPLES // 2, None]
    found = asked(server, wav(long, 1, 16), language="en", response_format="verbose_json").json()
    starts = [each["start"] for each in found["segments"]]
    assert found["duration"] == 2.5 and starts == sorted(starts) and starts[-1] > 1.5
    assert asked(server, wav(long, 1, 16), language="en", response_format="verbose_json").json() == found


def test_a_program_gives_a_sound_beside_its_text(listener: tuple[Path, torch.nn.Module]) -> None:
    model, samples, greedy = listener[1], sounds(1, seed=3)[0], SamplingParams(temperature=0, max_tokens=20)
    text = "<|startoftranscript|><|en|><|transcribe|><|notimestamps|>"
    prompts = [{"prompt": text, "multi_modal_data": {"audio": each}} for each in (SOUND, (samples, 16_000), (samples.astype(float), 16e3))]
    with engines_here(), LLM(str(listener[0]), dtype="float32", block_size=4, executor="inproc", threads=1, log="off") as llm:
        found = [answer.outputs[0] for answer in llm.generate(prompts, greedy)]
        wrong = (
            (samples, "is no sound: give a file's bytes, or"), ((samples[None], 16_000), "is no sound"), ((samples, 0), "is no sound"),
            ((samples[:0], 16_000), "has no samples: send a sound"),
            ((np.zeros(20_000, np.float32), 16_000), "has 1.2 seconds: the model reads 1 at once, give its parts"),
        )  # fmt: skip
        for sound, sentence in wrong:
            with pytest.raises(InvalidRequest, match=rf"multi_modal_data\['audio'\] {sentence}"):
                llm.generate({"prompt": text, "multi_modal_data": {"audio": sound}}, greedy)
    expected = right(model, SOUND, [BEGIN, EN, TASK, NO_TIMES], allowed=range(97), count=20)
    assert [[token for token in each.token_ids if token != END] for each in found[1:]] == [expected] * 2 and len(expected) > 5
    assert found[0].text


@pytest.mark.parametrize("count", [1, 3])
def test_a_stream_has_the_transcript_as_it_comes(server: Server, count: int) -> None:
    data = wav(np.concatenate(sounds(count, seed=5))[:, None], 1, 16)
    whole = asked(server, data, language="en").json()
    lines = asked(server, data, language="en", stream="true").text.split("\n\n")
    assert lines[-2:] == ["data: [DONE]", ""]
    *deltas, done = [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]
    assert done == {"type": "transcript.text.done", "text": whole["text"], "usage": whole["usage"]}
    assert {each["type"] for each in deltas} == {"transcript.text.delta"} and len(deltas) >= 3
    assert "".join(each["delta"] for each in deltas) == whole["text"]


@pytest.mark.parametrize(
    ("data", "fields", "sentence"),
    [
        (b"no sound", {}, "file is no plain WAV file, and what reads others is missing here: send WAV, or pip install 'vnext[audio]'."),
        (b"", {}, "file is missing: it is required."),
        (b"RIFF\0\0\0\0WAVE", {}, "file is no whole WAV file: it lacks its format or its samples."),
        (SOUND, {"language": "xx"}, "language is 'xx': it must be one of de, en."),
        (SOUND, {"response_format": "xml"}, "response_format is 'xml': it must be one of json, text, verbose_json, srt, vtt."),
        (SOUND, {"temperature": "3"}, "temperature is 3.0: it must lie between 0 and 1."),
        (SOUND, {"stream": "true", "response_format": "srt"}, "response_format is srt: a stream has json or text."),
        (SOUND, {"stream": "perhaps"}, "stream has a wrong type: Expected `bool`, got `str`."),
        (SOUND, {"beams": "3"}, "beams is no field of a transcription: leave it out."),
        (SOUND, {"timestamp_granularities[]": "word"}, "timestamp_granularities[] must be segment: there are no times of words."),
    ],
)
def test_what_is_no_transcription_gets_a_sentence(
    server: Server, data: bytes, fields: dict[str, str], sentence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    message = asked(server, data, **fields).json()["error"]["message"]
    assert message in (sentence, "file is no sound that can be read: send WAV, FLAC, Ogg, MP3, M4A or WebM.") if data == b"no sound" else message == sentence


def test_fields_in_brackets_are_read_as_openais_client_spells_them(server: Server) -> None:
    plain = asked(server, language="en").json()
    assert asked(server, language="en", **{"chunking_strategy[type]": "server_vad", "known_speaker_references[]": "x"}).json() == plain


def test_a_part_is_sent_once_and_has_a_name(server: Server) -> None:
    url, file = f"{server.url}/v1/audio/transcriptions", ("file", ("a.wav", SOUND))
    assert httpx.post(url, files=[file, file]).json()["error"]["message"] == "file is given twice: send it once."
    twice = httpx.post(url, files=[file], data={"language": ["en", "de"]}).json()["error"]["message"]
    assert twice == "language is given twice: send it once."
    body, form = b"--x\r\n\r\nhello\r\n--x--\r\n", {"Content-Type": "multipart/form-data; boundary=x"}
    nameless = httpx.post(url, content=body, headers=form).json()["error"]["message"]
    assert nameless == "The body is no valid multipart/form-data: a part has no name."


def test_a_body_that_is_no_form_gets_a_sentence(server: Server) -> None:
    url = f"{server.url}/v1/audio/transcriptions"
    plain = httpx.post(url, json={"file": "x"}).json()["error"]["message"]
    assert plain == "Send the body as multipart/form-data, with the part file (curl -F)."
    cut = httpx.post(url, content=b"--x\r\n", headers={"Content-Type": "multipart/form-data; boundary=x"}).json()["error"]["message"]
    assert cut == "The body is no valid multipart/form-data: it does not end with its boundary."
    said = httpx.post(f"{server.url}/v1/completions", json={"prompt": "a26", "max_tokens": 4}).json()["error"]["message"]
    assert "this model writes what it hears" in said
