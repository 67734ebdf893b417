"""Windows that are heard again, what the next one is told, and the numbers that a transcript has beside its text."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import httpx
import numpy as np
import pytest
import torch
from test_served_sounds import BEGIN, EN, NO_TIMES, SOUND, TASK, asked, spelled
from test_sounds import wav

from tests.e2e.serving import Server, serving
from tests.models.families.towers.listener_cases import END, PLACES, SAMPLES, SPELLED, TIMES, save_transcriber, sounds
from tests.text.test_beams import as_whisper_does
from vnext.media.sounds import sound_of, spectrogram_of
from vnext.replay.reading.source import open_log
from vnext.server.answers.transcripts import BEST_OF, TEMPERATURES
from vnext.state.events import RequestArrived, unpack_tokens

EARLIER, SILENCE = SPELLED["<|startofprev|>"], SPELLED["<|nospeech|>"]
LONG = wav(np.concatenate(sounds(3, seed=5))[: 5 * SAMPLES // 2, None], 1, 16)
PLAIN = ("--dtype", "float32", "--block-size", "4", "--log", "full")


def arrivals(server: Server) -> list[tuple[RequestArrived, list[int]]]:
    """The requests in a server's log, and their prompts behind the sound."""
    events = [event for item in open_log(server.log_dir).items() for event in getattr(item, "events", ())]
    found = [event for event in events if isinstance(event, RequestArrived)]
    return [(event, unpack_tokens(event.prompt).tolist()[64:]) for event in found]


@pytest.fixture(scope="module")
def sure(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, torch.nn.Module]:
    path = tmp_path_factory.mktemp("towers") / "sure"
    return path, save_transcriber(path)


@pytest.fixture(scope="module")
def server(sure: tuple[Path, torch.nn.Module], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(tmp_path_factory.mktemp("logs"), str(sure[0]), *PLAIN) as found:
        yield found


def test_a_good_answer_is_not_tried_again_and_a_doubtful_one_is(sure: tuple[Path, torch.nn.Module], tmp_path: Path) -> None:
    path = tmp_path / "doubtful"
    save_transcriber(path, 0.2)
    with serving(tmp_path / "logs", str(path), *PLAIN) as server:
        found = asked(server, language="en", response_format="verbose_json").json()
        again = asked(server, language="en", response_format="verbose_json").json()
        seeded = asked(server, language="en", response_format="verbose_json", seed="7").json()
        once = asked(server, language="en", temperature="0.3").json()
        live = asked(server, language="en", stream="true").text
        server.stop()
        requests = [event.sampling for event, _ in arrivals(server) if event.sampling.max_tokens > 1]
    assert again == found and found["segments"][0]["temperature"] in TEMPERATURES and seeded != found
    assert found["segments"][0]["avg_logprob"] < -1 and once["text"] and "transcript.text.done" in live
    heard = [round(each.temperature, 1) for each in requests]
    all_of_them = [0.0, *(each for each in TEMPERATURES[1:] for _ in range(BEST_OF))]
    assert heard == [*all_of_them * 3, 0.3, 0.0]
    assert len({each.seed for each in requests[1:6]}) == BEST_OF


def test_silence_is_no_text(sure: tuple[Path, torch.nn.Module], tmp_path: Path) -> None:
    """A model to which everything is probably silent and nothing is likely."""
    path = tmp_path / "silent"
    model = save_transcriber(path, 0.2)
    with torch.no_grad():
        model.model.decoder.embed_tokens.weight[SILENCE] = 50 * model.model.decoder.layer_norm.bias / model.model.decoder.layer_norm.bias.norm() ** 2
        model.model.decoder.layer_norm.weight *= 0.1
    model.save_pretrained(path)
    with serving(tmp_path / "logs", str(path), *PLAIN) as server:
        assert asked(server, language="en").json()["text"] == ""
        assert asked(server, LONG, language="en", response_format="verbose_json").json()["segments"] == []
        server.stop()
        assert {event.sampling.temperature for event, _ in arrivals(server)} == {0.0}


def test_the_next_window_is_told_what_was_said(sure: tuple[Path, torch.nn.Module], tmp_path: Path) -> None:
    with serving(tmp_path, str(sure[0]), *PLAIN) as server:
        found = asked(server, LONG, language="en", response_format="verbose_json", prompt="d3 e4").json()["segments"]
        asked(server, LONG, language="en", response_format="srt", temperature="0.6")
        server.stop()
        prompts = [prompt for event, prompt in arrivals(server) if event.sampling.max_tokens > 1]
    first, second, *others = prompts
    assert first == [EARLIER, 3, 4, BEGIN, EN, TASK] and second[:3] == [EARLIER, 3, 4] and second[-3:] == [BEGIN, EN, TASK]
    said = [token for each in found if each["seek"] == 0 for token in each["tokens"]]
    assert [token for token in second[3:-3] if token < TIMES] == said and any(token >= TIMES for token in second[3:-3])
    assert {each["seek"] for each in found} > {0} and [BEGIN, EN, TASK] in others[1:]


def test_log_probabilities_are_those_among_what_may_come(server: Server, sure: tuple[Path, torch.nn.Module]) -> None:
    """Of a text, by transformers; a verbose transcript has their means."""
    features = torch.from_numpy(spectrogram_of(sound_of(SOUND, "file"), 80, SAMPLES))[None]
    found = asked(server, language="en", **{"include[]": "logprobs"}).json()
    lines = asked(server, language="en", stream="true", include="logprobs").text.split("\n\n")
    assert json.loads(lines[-3].removeprefix("data: "))["logprobs"] == found["logprobs"]
    assert "".join(each["token"] for each in found["logprobs"]) == found["text"]
    assert all(bytes(each["bytes"]).decode() == each["token"] for each in found["logprobs"])
    tokens, expected = [BEGIN, EN, TASK, NO_TIMES], []
    with torch.inference_mode():
        while len(tokens) < PLACES:
            logits = sure[1](input_features=features, decoder_input_ids=torch.tensor([tokens])).logits[0, -1].double()
            logits[[id_ for id_ in SPELLED.values() if id_ != END]] = -torch.inf
            tokens.append(int(logits.argmax()))
            if tokens[-1] == END:
                break
            expected += [float(logits.log_softmax(0)[tokens[-1]])] if tokens[-1] < TIMES else []
    assert len(expected) > 3 and np.abs(np.array([each["logprob"] for each in found["logprobs"]]) - expected).max() < 1e-3


def test_a_verbose_transcript_says_how_sure_it_is(server: Server, sure: tuple[Path, torch.nn.Module]) -> None:
    features = torch.from_numpy(spectrogram_of(sound_of(SOUND, "file"), 80, SAMPLES))[None]
    [found, *_] = asked(server, language="en", response_format="verbose_json").json()["segments"]
    with torch.inference_mode():
        logits = sure[1](input_features=features, decoder_input_ids=torch.tensor([[BEGIN]])).logits[0, -1].double()
    assert found["no_speech_prob"] == pytest.approx(float(logits.softmax(0)[SILENCE]), rel=1e-3)
    assert found["temperature"] == 0 and -1 < found["avg_logprob"] < 0 < found["compression_ratio"] and found["seek"] == 0


def test_openais_client_reads_a_verbose_transcript(server: Server) -> None:
    openai = pytest.importorskip("openai", reason="openai is missing: pip install 'vnext[test]'")
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    found = client.audio.transcriptions.create(
        file=("a.wav", SOUND), model="", language="en", response_format="verbose_json", timestamp_granularities=["segment"]
    )
    assert found.segments and found.segments[0].avg_logprob < 0 and found.segments[0].no_speech_prob >= 0
    found = client.audio.transcriptions.create(file=("a.wav", SOUND), model="", language="en", include=["logprobs"])
    assert "".join(each.token for each in found.logprobs) == found.text


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"timestamp_granularities": "word"}, "timestamp_granularities must be segment: there are no times of words."),
        ({"timestamp_granularities[]": "word"}, "timestamp_granularities[] must be segment: there are no times of words."),
        ({"include": "words"}, "include must be logprobs."),
        ({"include[]": "logprobs", "response_format": "srt"}, "response_format is srt: include[] is only allowed with json."),
        ({"include[0]": "logprobs"}, "include[0] is no field of a transcription: leave it out."),
        ({"has_logprobs": "true"}, "has_logprobs is no field of a transcription: leave it out."),
    ],
)
def test_lists_that_are_not_served_get_a_sentence(server: Server, fields: dict[str, str], sentence: str) -> None:
    answer = asked(server, **fields)
    assert answer.status_code == 400 and answer.json()["error"]["message"] == sentence


def test_both_spellings_of_a_list_are_read(server: Server) -> None:
    url, file = f"{server.url}/v1/audio/transcriptions", ("file", ("a.wav", SOUND))
    both = {"timestamp_granularities[]": ["segment", "word"], "response_format": "verbose_json"}
    assert "no times of words" in httpx.post(url, files=[file], data=both).json()["error"]["message"]
    assert asked(server, language="en", timestamp_granularities="segment").json() == asked(server, language="en").json()


def test_beams_find_the_transcript_that_whisper_finds(server: Server, sure: tuple[Path, torch.nn.Module]) -> None:
    """By transformers' logits; a stream has it window by window."""
    others = 0
    for seed in range(4):
        data = wav(sounds(1, seed=seed)[0][:, None], 1, 16)
        features = torch.from_numpy(spectrogram_of(sound_of(data, "file"), 80, SAMPLES))[None]

        def after(tokens: tuple[int, ...]) -> list[float]:
            text = torch.tensor([[BEGIN, EN, TASK, NO_TIMES, *tokens]])
            logits = sure[1](input_features=features, decoder_input_ids=text).logits[0, -1].double()  # noqa: B023
            logits[[id_ for id_ in SPELLED.values() if id_ != END]] = -torch.inf
            return list(logits.log_softmax(0))

        with torch.inference_mode():
            expected = as_whisper_does(after, 3, PLACES - 4, END)
        found = asked(server, data, language="en", beam_width="3").json()["text"]
        assert found == spelled(token for token in expected if token not in (END, *range(TIMES, 97)))
        lines = asked(server, data, language="en", stream="true", beam_width="3").text.split("\n\n")
        assert json.loads(lines[-3].removeprefix("data: "))["text"] == found
        others += found != asked(server, data, language="en").json()["text"]
    assert others


def test_beams_keep_to_the_rules_for_times(server: Server) -> None:
    likelier = 0
    for seed in range(5):
        data = wav(sounds(1, seed=seed)[0][:, None], 1, 16)
        one, several = (asked(server, data, language="en", response_format="verbose_json", beam_width=width).json() for width in "15")
        assert several == asked(server, data, language="en", response_format="verbose_json", beam_width="5").json()
        assert all(0 <= each["start"] < each["end"] <= 1 and each["text"] for each in several["segments"])
        likelier += several["segments"][0]["avg_logprob"] > one["segments"][0]["avg_logprob"]
    assert likelier >= 3


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"beam_width": "11"}, "beam_width is 11: it must lie between 1 and 10."),
        ({"beam_width": "5", "temperature": "0.5"}, "beam_width is only allowed at temperature 0."),
        ({"beam_width": "a"}, "beam_width has a wrong type: Expected `int`, got `str`."),
    ],
)
def test_what_no_beam_search_has_gets_a_sentence(server: Server, fields: dict[str, str], sentence: str) -> None:
    answer = asked(server, **fields)
    assert answer.status_code == 400 and answer.json()["error"]["message"] == sentence
