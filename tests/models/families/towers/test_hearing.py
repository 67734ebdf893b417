"""Models that read sounds in their prompts: answers and logits are transformers', for any chunks, ranks, hits, preemption, drafts."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from engine_here import engines_here
from hearing_cases import MARK, processed, right, save_hearing
from listener_cases import SAMPLES, sounds
from safetensors.numpy import load_file, save_file
from test_seeing import answered, require_right

from vnext import LLM, SamplingParams
from vnext.media.sounds import HOP, states_of
from vnext.models.loading.unread import unread
from vnext.replay.cli.main import main as replay
from vnext.runtime.protocol.sampling_params import InvalidRequest

COUNT = 48
GREEDY = SamplingParams(temperature=0, max_tokens=COUNT, ignore_eos=True, logprobs=1)
LENGTHS = (SAMPLES, 2241, 9_999, 10_080, 10_241, 2560, 15_999)
SOUNDS = [sound[:length] for sound, length in zip(sounds(len(LENGTHS)), LENGTHS)]
WHICH: tuple[tuple[int, ...], ...] = ((1,), (0,), (2,), (3, 1), (4,), (5, 6), (1,), (6, 2, 0))
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {}, "chunks": {"max_num_batched_tokens": 7}, "ranks": {"tensor_parallel_size": 2},
    "stages": {"pipeline_parallel_size": 2},
    "preemption": {"num_blocks_override": 60, "max_model_len": 200}, "units": {"input_tokens": 2},
    "drafts": {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}},
}  # fmt: skip


@pytest.fixture(scope="module")
def hearing(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    path = tmp_path_factory.mktemp("hearing") / "model"
    model = save_hearing(path)

    @cache
    def expected(tokens: tuple[int, ...], which: tuple[int, ...]) -> tuple[list[int], torch.Tensor]:
        return right(model, tokens, [SOUNDS[each] for each in which], COUNT)

    return path, expected


@contextmanager
def started(path: Path, settings: str, dtype: str) -> Iterator[LLM]:
    """In this process, but for several ranks."""
    executor = "mp" if settings in ("ranks", "stages") else "inproc"
    with engines_here() if executor == "inproc" else nullcontext():
        with LLM(str(path), dtype=dtype, block_size=4, threads=1, executor=executor, **SETTINGS[settings]) as llm:
            yield llm


def prompts() -> list[dict[str, Any]]:
    texts = ("<bos> d3 e4 " + " f5 ".join([MARK] * len(which)) + " g6 h7" for which in WHICH)
    return [{"prompt": text, "multi_modal_data": {"audio": [(SOUNDS[at], 16_000) for at in which]}} for text, which in zip(texts, WHICH)]


@pytest.mark.parametrize("settings", SETTINGS)
def test_answers_are_those_of_transformers(hearing: tuple[Path, Any], settings: str) -> None:
    path, answer_of = hearing
    with started(path, settings, "float32") as llm:
        found = answered(llm, prompts(), GREEDY)
        require_right(found, answered(llm, prompts(), GREEDY), WHICH, answer_of)
    assert len({*map(tuple, found[1])}) == len({*WHICH}), "each sound is heard"


def test_no_number_depends_on_how_it_is_computed(hearing: tuple[Path, Any]) -> None:
    found = []
    for settings in SETTINGS:
        with started(hearing[0], settings, "bfloat16") as llm:
            found.append(answered(llm, prompts(), GREEDY))
    assert all(each == found[0] for each in found), [each == found[0] for each in found]


def test_the_same_sound_is_a_hit_and_one_sample_changes_all_behind(hearing: tuple[Path, Any]) -> None:
    changed = SOUNDS[0].copy()
    changed[4_000] += 0.25
    with started(hearing[0], "plain", "float32") as llm:
        asked = [{"prompt": f"<bos> d3 {MARK} g6", "multi_modal_data": {"audio": (each, 16_000)}} for each in (SOUNDS[0], changed)]
        first, again, other = (llm.generate(each, GREEDY, use_tqdm=False)[0] for each in (asked[0], asked[0], asked[1]))
    assert (first.num_cached_tokens, other.num_cached_tokens) == (0, 0) and again.num_cached_tokens > len(first.prompt_token_ids) - 5
    assert first.outputs[0].token_ids == again.outputs[0].token_ids != other.outputs[0].token_ids


def test_tokens_are_as_many_as_the_processor_has() -> None:
    for length in (*range(2240, 5000, 53), *LENGTHS, SAMPLES - 1, 2 * HOP * 9, 2 * HOP * 9 + 1):
        assert int(processed([np.ones(length, np.float32)])["counts"][0]) == states_of(length) // 2, length


def test_all_of_the_checkpoint_is_read(hearing: tuple[Path, Any]) -> None:
    assert unread(hearing[0]) == ""


def test_checkpoints_under_earlier_names_are_read(hearing: tuple[Path, Any], tmp_path: Path) -> None:
    shutil.copytree(hearing[0], tmp_path, dirs_exist_ok=True)
    tensors = load_file(tmp_path / "model.safetensors")
    assert any(name.startswith("language_model.model.") for name in tensors)
    newer = {"language_model.model.": "model.language_model.", "audio_tower.": "model.audio_tower.", "language_model.lm_head.": "lm_head."}

    def named(name: str) -> str:
        return next((new + name.removeprefix(old) for old, new in newer.items() if name.startswith(old)), f"model.{name}")

    save_file({named(name): each for name, each in tensors.items()}, tmp_path / "model.safetensors")
    assert unread(tmp_path) == ""
    with started(hearing[0], "plain", "float32") as llm, started(tmp_path, "plain", "float32") as other:
        assert answered(llm, prompts()[:2], GREEDY) == answered(other, prompts()[:2], GREEDY)


def test_a_log_is_run_again_where_vectors_were_kept(hearing: tuple[Path, Any], tmp_path: Path) -> None:
    """What the first engine has encoded the second one finds on disk."""
    logs, more = [], {"log": "full", "log_dir": str(tmp_path), "kv_disk_dir": str(tmp_path / "tier"), "executor": "inproc", "threads": 1}
    for settings in ({"max_num_batched_tokens": 11, "input_tokens": 2}, {}):
        with engines_here(), LLM(str(hearing[0]), dtype="float32", block_size=4, **more, **settings) as llm:
            logs.append((answered(llm, prompts(), GREEDY), str(llm.log_dir)))
    assert logs[0][0] == logs[1][0]
    for command in (["exec", logs[0][1]], ["exec", logs[1][1]], ["audit", logs[1][1], "--sample", "0.05", "--seed", "1"]):
        assert replay(command) == 0, command


WRONG = (
    ((SOUNDS[0], 16_000), "", r"the prompt has 0 times <\|AUDIO\|> and 1 sounds: they must be as many"),
    ((np.zeros(SAMPLES + 1, np.float32), 16_000), MARK, "has 1.0 seconds: the model reads 1 at once, give its parts"),
    ((np.zeros(2_240, np.float32), 16_000), MARK, "has 0.14 seconds: the model reads 0.16 at least"),
    (b"no sound", MARK, r"\['audio'\]\[0\] is no sound that can be read|is no plain WAV file, and what reads others is missing here"),
    (3, MARK, r"\['audio'\]\[0\] is no sound: give a file's bytes, or"),
)


def test_what_is_no_sound_gets_a_sentence(hearing: tuple[Path, Any]) -> None:
    with started(hearing[0], "plain", "float32") as llm:
        for sound, mark, sentence in WRONG:
            with pytest.raises(InvalidRequest, match=sentence):
                llm.generate({"prompt": f"<bos> {mark} d3", "multi_modal_data": {"audio": sound}}, GREEDY)
        with pytest.raises(InvalidRequest, match=r"\['image'\]\[0\] is an image, and this model reads sounds only"):
            llm.generate({"prompt": "<bos>", "multi_modal_data": {"image": np.zeros((8, 8, 3), np.uint8)}}, GREEDY)
