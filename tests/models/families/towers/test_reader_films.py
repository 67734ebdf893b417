"""Videos as SmolVLM reads them: frames, times and answers are those of transformers, and images beside them one sentence."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from engine_here import engines_here
from PIL import Image
from seeing_cases import films_of
from tower_cases import IMAGE, SIDE, TILE_TOKENS, save_reader
from transformers.image_utils import SizeDict
from transformers.models.smolvlm import processing_smolvlm
from transformers.video_utils import VideoMetadata

from vnext import LLM, SamplingParams
from vnext.media.custom import Custom
from vnext.media.films import Clip, Film
from vnext.media.pictures import MediaError
from vnext.media.tiles import FrameForm, form_in, in_words
from vnext.runtime.protocol.sampling_params import InvalidRequest

RNG = np.random.default_rng(5)
COUNT, SAMPLING = 24, {"fps": 2, "max_frames": 6, "video_size": {"longest_edge": 40}}
FILMS = [(RNG.integers(0, 256, (count, *size, 3), dtype=np.uint8), rate) for count, size, rate in ((9, (31, 50), 3.0), (2, (64, 20), 1.0), (70, (32, 32), 8.0))]
GREEDY = SamplingParams(temperature=0, max_tokens=COUNT, ignore_eos=True, logprobs=1)
SETTINGS: dict[str, dict[str, Any]] = {"plain": {}, "chunks": {"max_num_batched_tokens": 7}, "units": {"input_tokens": 2}, "ranks": {"tensor_parallel_size": 2}}


def chosen(clip: Clip, **asked: Any) -> list[int]:
    """transformers' frames."""
    kept = films_of("smolvlm").SmolVLMVideoProcessor
    metadata = VideoMetadata(total_num_frames=clip.frames, fps=clip.rate, duration=clip.frames / clip.rate)
    given = {"num_frames": SAMPLING["max_frames"], "fps": SAMPLING["fps"]} | asked
    return [int(each) for each in kept.sample_frames(kept.__new__(kept), metadata, **given)]


def resized(frame: np.ndarray) -> np.ndarray:
    """By transformers' sizes, and Pillow, since its own resizing needs torchvision."""
    tensor = torch.from_numpy(frame).permute(2, 0, 1)
    height, width = films_of("smolvlm").get_resize_output_image_size(tensor, SizeDict(longest_edge=40).longest_edge)
    within = Image.fromarray(frame).resize((width, height), Image.Resampling.LANCZOS)
    return np.asarray(within.resize((SIDE, SIDE), Image.Resampling.LANCZOS))


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, torch.nn.Module]:
    path = tmp_path_factory.mktemp("films") / "reader"
    model = save_reader(path)
    file = path / "preprocessor_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"video_sampling": SAMPLING}))
    return path, model


def form(path: Path) -> FrameForm:
    found = form_in(path, IMAGE, TILE_TOKENS).films
    assert found is not None
    return found


def test_frames_are_those_of_transformers(reader: tuple[Path, Any]) -> None:
    for frames in (1, 2, 9, 70, 100, 999, 35999):
        for rate in (0.1, 1.0, 3.0, 23.976, 30.0, 1000.0):
            clip = Clip(frames, rate, 48, 64)
            assert form(reader[0]).choose(clip, "it").numbers == chosen(clip), clip
            for custom in (Custom(num_frames=3), Custom(fps=0.5)):
                asked = {"num_frames": 3} if custom.num_frames else {"fps": 0.5}
                assert form(reader[0]).customized(custom, "it").choose(clip, "it").numbers == chosen(clip, **asked), (clip, custom)
    for custom in (Custom(num_frames=7), Custom(fps=1e6)):
        with pytest.raises(MediaError, match="^it is to be read in more frames than it may: 6, 1000 a second"):
            form(reader[0]).customized(custom, "it")


def test_the_text_is_the_one_of_transformers(reader: tuple[Path, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processing_smolvlm, "num2words", in_words)
    own = SimpleNamespace(image_seq_len=TILE_TOKENS, image_token="<image>", fake_image_token="<fake_token_around_image>", global_image_token="<global-img>")
    for frames, rate in ((9, 3.0), (2, 1.0), (4000, 0.5), (70, 8.0), (1, 24.0)):
        clip = Clip(frames, rate, SIDE, SIDE)
        numbers = chosen(clip)
        metadata = VideoMetadata(total_num_frames=frames, fps=rate, duration=frames / rate, frames_indices=numbers)
        pixels = np.zeros((len(numbers), SIDE, SIDE, 3), np.uint8)
        right = processing_smolvlm.SmolVLMProcessor.replace_video_token(own, {"pixel_values": pixels[None], "video_metadata": [metadata]}, 0)
        assert form(reader[0]).seen(Film(clip, numbers, pixels), "it").text == right


def test_numbers_are_words() -> None:
    known = {0: "zero", 13: "thirteen", 20: "twenty", 64: "sixty-four", 90: "ninety", 100: "one hundred", 768: "seven hundred and sixty-eight"}
    assert {each: in_words(each) for each in known} == known and len({in_words(each) for each in range(1000)}) == 1000


@pytest.mark.parametrize("settings", SETTINGS)
def test_answers_are_those_of_transformers(reader: tuple[Path, torch.nn.Module], settings: str) -> None:
    path, model = reader
    prompts = [{"prompt": f"<bos> d3 {' f5 '.join(['<video>'] * len(which))} g6", "multi_modal_data": {"video": [FILMS[at] for at in which]}} for which in ((0,), (1, 2))]
    executor = "mp" if settings == "ranks" else "inproc"
    with engines_here() if executor == "inproc" else nullcontext(), LLM(str(path), dtype="float32", block_size=4, threads=1, executor=executor, **SETTINGS[settings]) as llm:
        found, again = (llm.generate(prompts, GREEDY, use_tqdm=False) for _ in range(2))
        with pytest.raises(InvalidRequest, match="^the prompt has images and videos, and this model reads either: leave one of the two out"):
            llm.generate({"prompt": "<image> <video>", "multi_modal_data": {"image": FILMS[0][0][0], "video": FILMS[0]}}, GREEDY)
    for which, answer, same in zip(((0,), (1, 2)), found, again):
        ids = torch.tensor([list(answer.prompt_token_ids)])
        frames = [resized(FILMS[at][0][number]) for at in which for number in chosen(Clip(len(FILMS[at][0]), FILMS[at][1], 1, 1))]
        pixels = (torch.from_numpy(np.stack(frames)).permute(0, 3, 1, 2).float() / 255 - 0.5) / 0.5
        assert (ids == IMAGE).sum() == TILE_TOKENS * len(frames) and same.num_cached_tokens > len(ids[0]) - 8
        with torch.inference_mode():
            right = model.generate(
                input_ids=ids, pixel_values=pixels[None], max_new_tokens=COUNT, do_sample=False, eos_token_id=None, output_logits=True, return_dict_in_generate=True,
            )  # fmt: skip
        tokens = right.sequences[0, len(ids[0]) :]
        assert list(answer.outputs[0].token_ids) == list(same.outputs[0].token_ids) == tokens.tolist()
        theirs = torch.cat(right.logits).log_softmax(-1).gather(1, tokens[:, None])[:, 0]
        ours = torch.tensor([row[token].logprob for row, token in zip(answer.outputs[0].logprobs, tokens.tolist())])
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


def test_files_that_are_out_of_order_are_refused(tmp_path: Path) -> None:
    for sampling in ({"fps": 0, "max_frames": 3}, {"fps": 1, "max_frames": "all"}, {"fps": 1, "max_frames": 4, "video_size": {"longest_edge": -1}}):
        (tmp_path / "preprocessor_config.json").write_text(json.dumps({"video_sampling": sampling}))
        with pytest.raises(MediaError, match="^preprocessor_config.json: "):
            form_in(tmp_path, IMAGE, TILE_TOKENS)
