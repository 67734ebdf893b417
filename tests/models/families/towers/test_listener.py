"""Models that listen: states, logits and tokens are transformers', for any chunk, rank count, hit, preemption and mates."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from engine_here import llm_here
from listener_cases import SAMPLES, SPAN, STATES, save_listener, sounds

from vnext import LLM
from vnext.media.sounds import file_of, spectrogram_of
from vnext.media.store import MediaStore, folder_of
from vnext.models.config.model_config import load_config
from vnext.models.families.towers import whisper
from vnext.models.layers.kv_cache import make_kv_cache
from vnext.models.layers.sharding import alone
from vnext.models.layers.tower import BLOCK_SIZE, listen, page_count, whole
from vnext.models.loading.unread import unread
from vnext.models.loading.weights import load_params
from vnext.runtime.client.output_stream import Refused
from vnext.runtime.protocol.messages import SubmitRequest
from vnext.state.events import pack_tokens, unpack_tokens
from vnext.state.params import Sampling
from vnext.state.store.inputs import input_tokens

SOUNDS = sounds(4)
COUNT = 12
TEXTS = ([3, 10, 11], [3, 12, 13, 14, 15], [3], [3, 10, 11, 20, 21, 22, 23, 24, 25])


@pytest.fixture(scope="module")
def listener(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, torch.nn.Module]:
    path = tmp_path_factory.mktemp("towers") / "listener"
    return path, save_listener(path)


def features(sound: int) -> torch.Tensor:
    return torch.from_numpy(spectrogram_of(SOUNDS[sound], 80, SAMPLES))[None]


def right(model: Any, sound: int, text: Sequence[int]) -> list[int]:
    """transformers' greedy answer."""
    tokens = list(text)
    with torch.inference_mode():
        for _ in range(COUNT):
            found = model(input_features=features(sound), decoder_input_ids=torch.tensor([tokens])).logits
            tokens.append(int(found[0, -1].argmax()))
    return tokens[len(text) :]


def answers(llm: LLM, asked: Sequence[tuple[int, Sequence[int]]], **params: Any) -> tuple[list[list[int]], list[int]]:
    """The engine's answers to (sound, text), and the tokens that each found in the cache."""
    store = MediaStore([folder_of(llm._address)])
    digests = [store.put([file_of(each)], "the sound")[0] for each in SOUNDS]
    sampling = Sampling(**{"seed": 0, "max_tokens": COUNT, "temperature": 0.0, "ignore_eos": True} | params)
    found, hits = {str(at): [] for at in range(len(asked))}, dict.fromkeys(map(str, range(len(asked))), 0)
    prompts = [np.concatenate((input_tokens(digests[sound], SPAN), np.array(text, np.int32))) for sound, text in asked]
    requests = [SubmitRequest(name=name, prompt=pack_tokens(each), sampling=sampling, has_seed=True) for name, each in zip(found, prompts)]
    for output in llm._client.run(requests):
        assert not output.error
        found[output.name] += unpack_tokens(output.tokens).tolist()
        hits[output.name] = max(hits[output.name], output.cached_tokens)
    return [*found.values()], [*hits.values()]


def test_states_are_those_of_transformers(listener: tuple[Path, torch.nn.Module]) -> None:
    path, model = listener
    config = whisper.tower_config(load_config(path))
    assert unread(path) == "" and config.sound is not None and config.sound.span == SPAN
    params = load_params(path, config, alone(), torch.float32, "cpu", assemble=whisper.assemble_tower)
    kv = make_kv_cache(config, page_count(STATES), BLOCK_SIZE, torch.float32, "cpu", alone())
    with torch.inference_mode():
        ours, theirs = whole(listen(params, kv, features(0)[0], config)), model.model.encoder(features(0)).last_hidden_state[0]
        assert all(torch.equal(whole(listen(params, kv, features(0)[0], config, units)), ours) for units in (1, 7, 16, 99))
    assert float((ours[:STATES] - theirs).abs().max() / theirs.abs().max()) <= 1e-4 and not ours[STATES:].any()


@pytest.mark.parametrize(
    "settings",
    [{}, {"max_num_batched_tokens": 7}, {"tensor_parallel_size": 2}, {"num_blocks_override": 24, "max_model_len": 92}, {"block_size": 16}, {"input_tokens": 9}],
    ids=["plain", "chunks", "ranks", "preemption", "blocks", "units"],
)
def test_answers_are_those_of_transformers(listener: tuple[Path, torch.nn.Module], settings: dict[str, Any]) -> None:
    path, model = listener
    asked = [(0, TEXTS[0]), (1, TEXTS[1]), (0, TEXTS[2]), (2, TEXTS[0]), (3, TEXTS[3])]
    made = llm_here if "tensor_parallel_size" not in settings else LLM
    with made(str(path), dtype="float32", **{"block_size": 4} | settings) as llm:
        found, _ = answers(llm, asked)
    assert found == [right(model, *each) for each in asked]


def test_the_same_sound_is_a_hit_and_another_one_is_none(listener: tuple[Path, torch.nn.Module]) -> None:
    with llm_here(listener[0], dtype="float32", block_size=4) as llm:
        first, hits = answers(llm, [(0, TEXTS[0])])
        again, same = answers(llm, [(0, TEXTS[0])])
        other, shared = answers(llm, [(0, TEXTS[1])])
        _, others = answers(llm, [(1, TEXTS[0])])
    assert first == again and hits == [0] and same == [SPAN] and shared == [SPAN] and others == [0]
    assert other == [right(listener[1], 0, TEXTS[1])]


def test_sampled_answers_have_the_bits_of_any_batch(listener: tuple[Path, torch.nn.Module]) -> None:
    asked = [(at % 4, TEXTS[at % 3]) for at in range(12)]
    found = []
    for settings in ({}, {"max_num_batched_tokens": 9}, {"max_num_seqs": 1}, {"threads": 2}):
        with (LLM if "threads" in settings else llm_here)(str(listener[0]), dtype="bfloat16", block_size=4, **settings) as llm:
            found.append(answers(llm, asked, temperature=1.0)[0])
    assert found[0] == found[1] == found[2] == found[3]


def test_a_prompt_without_its_sound_is_refused(listener: tuple[Path, torch.nn.Module]) -> None:
    with llm_here(listener[0], load_format="dummy", block_size=16) as llm:
        assert len(answers(llm, [(0, TEXTS[0])])[0][0]) == COUNT
        whole = input_tokens(bytes(15), SPAN)
        for prompt in ([3, 4], [*whole], [3, *whole, 3], [*input_tokens(bytes(15), SPAN - 1), 3]):
            sampling = Sampling(seed=0, max_tokens=4)
            asked = SubmitRequest(name="0", prompt=pack_tokens(prompt), sampling=sampling, has_seed=True)
            with pytest.raises(Refused, match="^this model writes what it hears: send a sound to /v1/audio/transcriptions or"):
                list(llm._client.run([asked]))
