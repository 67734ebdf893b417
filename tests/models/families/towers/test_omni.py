"""Qwen2.5-Omni reads images and sounds in one prompt: answers are transformers', for any chunks, ranks, hits, preemption, drafts."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from engine_here import engines_here
from listener_cases import sounds
from omni_cases import AUDIO, IMAGE_MARK, SOUND_MARK, right, save_omni
from safetensors.torch import load_file, save_file
from seeing_cases import IMAGE
from test_seeing import answered

from vnext import LLM, SamplingParams
from vnext.models.config.model_config import load_config
from vnext.models.loading.unread import has_tower, unread
from vnext.replay.cli.main import main as replay
from vnext.runtime.protocol.sampling_params import InvalidRequest

COUNT = 24
GREEDY = SamplingParams(temperature=0, max_tokens=COUNT, ignore_eos=True, logprobs=1)
RNG = np.random.default_rng(3)
PICTURES = [RNG.integers(0, 256, (*size, 3), dtype=np.uint8) for size in ((40, 61), (90, 33))]
SOUNDS = [sound[:length] for sound, length in zip(sounds(3), (16_000, 3_201, 9_999))]
"""Of ten windows, of one column more than one window has, and of an odd number of columns."""
WHICH: tuple[str, ...] = ("is", "s", "i", "sis", "iis", "ss")
SETTINGS: dict[str, dict[str, Any]] = {
    "chunks": {"max_num_batched_tokens": 7}, "ranks": {"tensor_parallel_size": 2}, "units": {"input_tokens": 2},
    "preemption": {"num_blocks_override": 60, "max_model_len": 200, "enable_prefix_caching": False},
    "drafts": {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}},
}  # fmt: skip


@pytest.fixture(scope="module")
def omni(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    path = tmp_path_factory.mktemp("omni") / "model"
    return path, save_omni(path)


@contextmanager
def started(path: Path, dtype: str = "float32", **settings: Any) -> Iterator[LLM]:
    """In this process, but for several ranks."""
    executor = "mp" if "tensor_parallel_size" in settings else "inproc"
    with engines_here() if executor == "inproc" else nullcontext():
        with LLM(str(path), dtype=dtype, block_size=4, threads=1, executor=executor, **settings) as llm:
            yield llm


def given(which: str) -> dict[str, list[np.ndarray]]:
    """The images and sounds of a prompt, in their orders."""
    return {"i": PICTURES[: which.count("i")], "s": SOUNDS[: which.count("s")]}


def prompts() -> list[dict[str, Any]]:
    found = []
    for which in WHICH:
        text = " f5 ".join({"i": IMAGE_MARK, "s": SOUND_MARK}[kind] for kind in which)
        data = {"image": given(which)["i"], "audio": [(each, 16_000) for each in given(which)["s"]]}
        found.append({"prompt": f"<bos> d3 {text} g6", "multi_modal_data": {kind: each for kind, each in data.items() if each}})
    return found


def test_answers_are_those_of_transformers(omni: tuple[Path, Any]) -> None:
    path, model = omni
    with started(path) as llm:
        first, again = answered(llm, prompts(), GREEDY), answered(llm, prompts(), GREEDY)
    assert again == first, "of what the cache has"
    for tokens, answer, logprobs, which in zip(*first, WHICH):
        expected, theirs = right(model, tokens, given(which)["i"], given(which)["s"], COUNT)
        assert answer == expected
        torch.testing.assert_close(torch.tensor(logprobs), theirs, rtol=0, atol=1e-4)
    assert unread(path) == "" and has_tower(path, load_config(path))


def test_no_setting_changes_a_bit(omni: tuple[Path, Any]) -> None:
    with started(omni[0], "bfloat16") as llm:
        plain = answered(llm, prompts(), GREEDY)
    for name, settings in SETTINGS.items():
        with started(omni[0], "bfloat16", **settings) as llm:
            assert answered(llm, prompts(), GREEDY) == plain, name


def test_a_sound_is_told_from_an_image_in_the_cache(omni: tuple[Path, Any]) -> None:
    """A changed sample hits nothing behind it."""
    changed = SOUNDS[0].copy()
    changed[4_000] += 0.25
    text = f"<bos> d3 {IMAGE_MARK} {SOUND_MARK} g6"
    asked = [{"prompt": text, "multi_modal_data": {"image": PICTURES[:1], "audio": [(each, 16_000)]}} for each in (SOUNDS[0], changed)]
    with started(omni[0]) as llm:
        first, again, other = (llm.generate(each, GREEDY, use_tqdm=False)[0] for each in (asked[0], asked[0], asked[1]))
    tokens = list(first.prompt_token_ids)
    behind = len(tokens) - tokens[::-1].index(AUDIO)
    assert first.num_cached_tokens == 0 and again.num_cached_tokens >= behind - 4
    assert tokens.index(IMAGE) < other.num_cached_tokens <= tokens.index(AUDIO)
    assert first.outputs[0].token_ids == again.outputs[0].token_ids != other.outputs[0].token_ids


def test_a_conversation_has_both(omni: tuple[Path, Any]) -> None:
    def parts(*order: str) -> list[dict[str, Any]]:
        kinds = {"i": {"type": "image", "image": PICTURES[0]}, "s": {"type": "audio", "audio": (SOUNDS[0], 16_000)}}
        return [{"role": "user", "content": [*(kinds[each] for each in order), {"type": "text", "text": "d3"}]}]

    with started(omni[0]) as llm:
        found = [llm.chat(parts(*order), GREEDY, use_tqdm=False)[0] for order in ("is", "si")]
        with pytest.raises(InvalidRequest, match="is a video, and this model reads images and sounds only"):
            llm.generate({"prompt": "<bos>", "multi_modal_data": {"video": (np.zeros((2, 32, 32, 3), np.uint8), 2.0)}})
        with pytest.raises(InvalidRequest, match="the prompt has 1 times <.AUDIO.> and 0 sounds: they must be as many"):
            llm.generate({"prompt": f"<bos> {IMAGE_MARK} {SOUND_MARK}", "multi_modal_data": {"image": PICTURES[:1]}})
    for answer, order in zip(found, ((IMAGE, AUDIO), (AUDIO, IMAGE))):
        tokens = list(answer.prompt_token_ids)
        assert sorted(order, key=tokens.index) == list(order)
        assert list(answer.outputs[0].token_ids) == right(omni[1], tokens, PICTURES[:1], SOUNDS[:1], COUNT)[0]


def test_a_checkpoint_with_a_voice_answers_by_its_thinker(omni: tuple[Path, Any], tmp_path: Path) -> None:
    """As the hub has it."""
    for file in omni[0].iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    thinker = json.loads((omni[0] / "config.json").read_text())
    whole = {"architectures": ["Qwen2_5OmniModel"], "model_type": "qwen2_5_omni", "torch_dtype": "float32", "thinker_config": thinker}
    whole |= {"enable_audio_output": True, "talker_config": {"hidden_size": 8}, "token2wav_config": {"dit_config": {}}}
    (tmp_path / "config.json").write_text(json.dumps(whole))
    tensors = load_file(omni[0] / "model.safetensors")
    named = {f"thinker.{name}": each for name, each in tensors.items()} | {"talker.model.norm.weight": torch.ones(8)}
    save_file(named, tmp_path / "model.safetensors", {"format": "pt"})
    with started(omni[0]) as llm, started(tmp_path) as other:
        assert answered(other, prompts()[:1], GREEDY) == answered(llm, prompts()[:1], GREEDY)
    assert unread(tmp_path) == "" and has_tower(tmp_path, load_config(tmp_path))


def test_a_log_is_run_again_where_vectors_were_kept(omni: tuple[Path, Any], tmp_path: Path) -> None:
    kept = {"log": "full", "log_dir": str(tmp_path), "kv_disk_dir": str(tmp_path / "tier")}
    with started(omni[0], **kept) as llm:
        answered(llm, prompts()[:3], GREEDY)
        log = str(llm.log_dir)
    assert replay(["exec", log]) == 0 and replay(["exec", log, "--solo", "--requests", "0"]) == 0
