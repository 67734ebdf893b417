"""Videos as LLaVA-OneVision reads them: frames and answers are those of transformers, also beside images."""

from __future__ import annotations

import json
from contextlib import nullcontext
from functools import partial, wraps
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from engine_here import engines_here
from PIL import Image
from seeing_cases import IMAGE, SIDE, processed, save_seeing
from transformers.video_utils import VideoMetadata, default_sample_indices_fn

from vnext import LLM, SamplingParams
from vnext.media.anyres import SquareFilmForm, form_in
from vnext.media.custom import Custom
from vnext.media.films import Clip
from vnext.media.pictures import MediaError
from vnext.media.pixels import CLIP_DEVIATION, CLIP_MEAN

FILM, GRID, COUNT, FRAMES = 96, SIDE // 4, 24, 3
VECTORS = (GRID // 2) ** 2
RNG = np.random.default_rng(6)
FILMS = [(RNG.integers(0, 256, (count, *size, 3), dtype=np.uint8), 4.0) for count, size in ((9, (31, 50)), (2, (64, 20)), (1, (32, 32)))]
PICTURE = RNG.integers(0, 256, (40, 61, 3), dtype=np.uint8)
GREEDY = SamplingParams(temperature=0, max_tokens=COUNT, ignore_eos=True, logprobs=1)
ASKED: tuple[tuple[Any, ...], ...] = ((0,), (1, "image", 2))
SETTINGS: dict[str, dict[str, Any]] = {"plain": {}, "chunks": {"max_num_batched_tokens": 7}, "units": {"input_tokens": 2}, "ranks": {"tensor_parallel_size": 2}}


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, torch.nn.Module]:
    path = tmp_path_factory.mktemp("films") / "squares"
    model = save_seeing(path, "anyres")
    file = path / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    [old] = [word for word, token in tokenizer["model"]["vocab"].items() if token == FILM]
    tokenizer["model"]["vocab"]["<video>"] = tokenizer["model"]["vocab"].pop(old)
    tokenizer["added_tokens"].append(tokenizer["added_tokens"][-1] | {"id": FILM, "content": "<video>"})
    file.write_text(json.dumps(tokenizer))
    (path / "video_preprocessor_config.json").write_text(json.dumps({"num_frames": FRAMES}))
    return path, model


def form(path: Path) -> SquareFilmForm:
    found = form_in(path, IMAGE, SIDE, GRID, 3, FILM).films
    assert found is not None
    return found


def test_frames_are_those_of_transformers(seeing: tuple[Path, Any]) -> None:
    for frames in (3, 4, 70, 999):
        for rate in (0.1, 4.0, 29.97):
            clip, metadata = Clip(frames, rate, 48, 64), VideoMetadata(total_num_frames=frames, fps=rate)
            assert form(seeing[0]).choose(clip, "it").numbers == default_sample_indices_fn(metadata, num_frames=FRAMES).tolist()
            two = form(seeing[0]).customized(Custom(num_frames=2), "it").choose(clip, "it").numbers
            assert two == default_sample_indices_fn(metadata, num_frames=2).tolist()
            paced = form(seeing[0])._replace(most=100).customized(Custom(fps=rate / 10), "it").choose(clip, "it").numbers
            assert paced == default_sample_indices_fn(metadata, fps=rate / 10).tolist()
    assert form(seeing[0]).choose(Clip(2, 1.0, 48, 64), "it").numbers == [0, 1] and form(Path("/nowhere")).most == 32
    for custom in (Custom(num_frames=4), Custom(fps=1e6)):
        with pytest.raises(MediaError, match="^it is to be read in more frames than it may: 3, 1000 a second"):
            form(seeing[0]).customized(custom, "it")


@pytest.mark.parametrize("settings", SETTINGS)
def test_answers_are_those_of_transformers(seeing: tuple[Path, torch.nn.Module], settings: str) -> None:
    path, model = seeing
    prompts = [
        {
            "prompt": "<bos> d3 " + " f5 ".join("<image>" if each == "image" else "<video>" for each in which) + " g6",
            "multi_modal_data": {"video": [FILMS[each] for each in which if each != "image"]} | ({"image": PICTURE} if "image" in which else {}),
        }
        for which in ASKED
    ]  # fmt: skip
    executor = "mp" if settings == "ranks" else "inproc"
    with engines_here() if executor == "inproc" else nullcontext():
        with LLM(str(path), dtype="float32", block_size=4, threads=1, executor=executor, **SETTINGS[settings]) as llm:
            found, again = (llm.generate(prompts, GREEDY, use_tqdm=False) for _ in range(2))
    for which, answer, same in zip(ASKED, found, again):
        ids, pixels, images = torch.tensor([list(answer.prompt_token_ids)]), list[torch.Tensor](), dict[str, Any]()
        for each in which:
            if each == "image":
                images = processed("anyres", [PICTURE])
                continue
            film, count = FILMS[each][0], min(FRAMES, len(FILMS[each][0]))
            frames = [np.asarray(Image.fromarray(film[at * len(film) // count]).resize((SIDE, SIDE), Image.Resampling.BICUBIC)) for at in range(count)]
            numbers = (torch.from_numpy(np.stack(frames)).float() / 255 - torch.tensor(CLIP_MEAN)) / torch.tensor(CLIP_DEVIATION)
            pixels.append(numbers.permute(0, 3, 1, 2))
        assert (ids == FILM).sum() == sum(len(each) * VECTORS + 1 for each in pixels) and same.num_cached_tokens > len(ids[0]) - 8
        with torch.inference_mode():
            own = model.model.get_video_features
            model.model.get_video_features = wraps(own)(partial(joined, own, pixels))
            right = model.generate(
                input_ids=ids, pixel_values_videos=pixels[0][None], **images, max_new_tokens=COUNT, do_sample=False, eos_token_id=None,
                output_logits=True, return_dict_in_generate=True,
            )  # fmt: skip
            model.model.get_video_features = own
        tokens = right.sequences[0, len(ids[0]) :]
        assert list(answer.outputs[0].token_ids) == list(same.outputs[0].token_ids) == tokens.tolist()
        theirs = torch.cat(right.logits).log_softmax(-1).gather(1, tokens[:, None])[:, 0]
        ours = torch.tensor([row[token].logprob for row, token in zip(answer.outputs[0].logprobs, tokens.tolist())])
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


def joined(own: Any, pixels: list[torch.Tensor], *_: Any, **more: Any) -> Any:
    """transformers' features of videos of several lengths, which it takes one by one."""
    more.pop("pixel_values_videos", None)
    each = [own(frames[None], **more) for frames in pixels]
    each[0].pooler_output = torch.cat([one.pooler_output for one in each], dim=1)
    return each[0]


def test_files_that_are_out_of_order_are_refused(tmp_path: Path) -> None:
    for settings in ({"num_frames": "all"}, {"num_frames": -1}, {"fps": -2}):
        (tmp_path / "video_preprocessor_config.json").write_text(json.dumps(settings))
        with pytest.raises(MediaError, match="^video_preprocessor_config.json: "):
            form(tmp_path)
