"""Images beside guidance and grammars: tokens are those that transformers' logits make, and the same for any chunks and drafts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from engine_here import engines_here
from seeing_cases import CASES, GRIDS, IMAGE, MARKS, processed, save_seeing
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel

from vnext import LLM, SamplingParams

COUNT, SCALE, NEGATIVE, ALLOWED = 12, 2.5, [5, 9, 11], [3, 4, 5]
PICTURES = [np.random.default_rng(9).integers(0, 256, (*size, 3), dtype=np.uint8) for size in ((40, 61), (90, 33))]
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {}, "chunks": {"max_num_batched_tokens": 7}, "units": {"input_tokens": 2},
    "drafts": {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}},
}  # fmt: skip


@pytest.fixture(scope="module", params=["whole", "grid", "deep"])
def seeing(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path, torch.nn.Module]:
    path = tmp_path_factory.mktemp("steered") / request.param
    model = save_seeing(path, request.param)
    tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
    tokenizer.decoder = ByteLevel()  # one that grammars know
    tokenizer.save(str(path / "tokenizer.json"))
    return request.param, path, model


def logprobs_of(model: torch.nn.Module, tokens: list[int], kind: str = "", pictures: list[np.ndarray] | None = None) -> torch.Tensor:
    """Of what follows these tokens, [V], computed anew; without `pictures` of a text."""
    ids, more = torch.tensor([tokens]), dict[str, Any]()
    if pictures:
        more = {"mm_token_type_ids" if kind in GRIDS else "token_type_ids": (ids == IMAGE).long(), **processed(kind, pictures)}
    elif kind == "whole":
        more = {"token_type_ids": torch.zeros_like(ids)}
    with torch.inference_mode():
        found: torch.Tensor = model(input_ids=ids, **more, use_cache=False).logits[0, -1].float().log_softmax(-1)
    return found


def prompt_of(kind: str, pictures: list[np.ndarray]) -> dict[str, Any]:
    mark = MARKS.get(kind, CASES[kind].words[0])
    return {"prompt": "<bos> d3 " + " f5 ".join([mark] * len(pictures)) + " g6 h7", "multi_modal_data": {"image": pictures}}


def answered(path: Path, kind: str, params: list[SamplingParams], **settings: Any) -> list[tuple[list[int], list[int]]]:
    """(prompt, answer) of one and of two images, by each of the parameters."""
    with engines_here(), LLM(str(path), dtype="float32", block_size=4, threads=1, executor="inproc", **settings) as llm:
        asked = [(prompt_of(kind, PICTURES[:count]), each) for count in (1, 2) for each in params]
        found = llm.generate([prompt for prompt, _ in asked], [each for _, each in asked], use_tqdm=False)
    return [(list(each.prompt_token_ids), list(each.outputs[0].token_ids)) for each in found]


def test_guidance_leads_away_from_a_text_with_no_image(seeing: tuple[str, Path, torch.nn.Module]) -> None:
    kind, path, model = seeing
    guided = SamplingParams(temperature=0, max_tokens=COUNT, ignore_eos=True, guidance_scale=SCALE, negative_prompt=NEGATIVE)
    last = SamplingParams(temperature=0, max_tokens=COUNT, ignore_eos=True, guidance_scale=SCALE)
    usual = SamplingParams(temperature=0, max_tokens=COUNT, ignore_eos=True)
    found = answered(path, kind, [guided, last, usual], enable_guidance=True)
    for at, (prompt, answer) in enumerate(found):
        count, which = 1 + at // 3, at % 3
        negative = (NEGATIVE, prompt[-1:], None)[which]
        for length, token in enumerate(answer):
            beside = logprobs_of(model, prompt + answer[:length], kind, PICTURES[:count])
            if negative is not None:
                alone = logprobs_of(model, negative + answer[:length], kind)
                beside = alone + SCALE * (beside - alone)
            assert token == int(beside.argmax()), (at, length)
    assert len({tuple(answer) for _, answer in found}) == len(found)
    assert answered(path, kind, [guided, last, usual], enable_guidance=True, max_num_batched_tokens=7) == found


def test_a_negative_prompt_marks_no_image(seeing: tuple[str, Path, torch.nn.Module]) -> None:
    kind, path, _ = seeing
    words = CASES[kind].words[:1] + (("<|video_pad|>",) if kind in GRIDS else ())
    for word in words:
        params = SamplingParams(temperature=0, max_tokens=2, guidance_scale=SCALE, negative_prompt=f"{word} f5")
        with pytest.raises(Exception, match="the negative prompt, or without one the end of the prompt, marks an image: guidance leaves a text, give one"):
            answered(path, kind, [params], enable_guidance=True)


def test_a_negative_prompt_is_no_longer_than_one_with_images(seeing: tuple[str, Path, torch.nn.Module]) -> None:
    kind, path, _ = seeing
    params = SamplingParams(temperature=0, max_tokens=2, guidance_scale=SCALE, negative_prompt=NEGATIVE * 25)
    with pytest.raises(Exception, match="an image does not go with a negative prompt that is longer than the prompt: shorten it"):
        answered(path, kind, [params], enable_guidance=True)


@pytest.mark.parametrize("settings", SETTINGS)
def test_a_grammar_holds_behind_images(seeing: tuple[str, Path, torch.nn.Module], settings: str) -> None:
    kind, path, model = seeing
    limited = SamplingParams(temperature=0, max_tokens=COUNT, structured_outputs={"regex": f"(d3|e4|f5){{{COUNT}}}"})
    for at, (prompt, answer) in enumerate(answered(path, kind, [limited], **SETTINGS[settings])):
        for length, token in enumerate(answer):
            logprobs = logprobs_of(model, prompt + answer[:length], kind, PICTURES[: 1 + at])[ALLOWED]
            assert token == ALLOWED[int(logprobs.argmax())], (at, length)
        assert len(answer) == COUNT
