"""Families that read videos: answers and logits are transformers', and the same for any chunks, ranks, hits, preemption and drafts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from seeing_cases import FILM, IMAGE, processed, processed_film, save_seeing
from test_seeing import SETTINGS, answered, require_right, started

RNG = np.random.default_rng(7)
FILMS = [RNG.integers(0, 256, (count, *size, 3), dtype=np.uint8) for count, size in ((20, (40, 61)), (7, (90, 33)), (60, (32, 32)))]
RATES = (8.0, 3.0, 0.4)
PICTURE = RNG.integers(0, 256, (40, 61, 3), dtype=np.uint8)
ASKED: tuple[tuple[Any, ...], ...] = ((0,), (1,), (2,), ("image", 1), (0, "image", 2), (0,))
SHOWN, SEEN = "<|vision_start|><|video_pad|><|vision_end|>", "<|vision_start|><|image_pad|><|vision_end|>"
MARKED: dict[str, Callable[[str], str]] = {"deep_parallel": str.upper}
"""How a kind of model spells these, where otherwise."""


def places_of(ids: torch.Tensor, grids: list[tuple[int, int, int]], intervals: list[float]) -> tuple[torch.Tensor, torch.Tensor]:
    """Places by axis, as the authors' code has them: what follows begins behind the furthest one. (transformers 5.23 leaves time
    out where texts go on, and not where answers do.)"""
    found, next_, own = list[torch.Tensor](), 0, iter(zip(grids, intervals, strict=True))
    for kind, group in groupby(ids.tolist(), lambda token: token if token in (IMAGE, FILM) else -1):
        length = len(list(group))
        if kind < 0:
            found.append(torch.arange(length).expand(3, -1) + next_)
        while kind >= 0 and length:
            (count, rows, columns), interval = next(own)
            times = (torch.arange(count) * interval).long()
            axes = torch.meshgrid(times, torch.arange(rows // 2), torch.arange(columns // 2), indexing="ij")
            found.append(torch.stack(axes).reshape(3, -1) + next_)
            length -= found[-1].shape[1]
        next_ = int(torch.cat(found, dim=1).max()) + 1
    places = torch.cat(found, dim=1)
    return places[:, None], torch.tensor([[next_ - len(ids)]])


@pytest.fixture(scope="module", params=["grid", "deep", "nets", "deep_parallel"])
def seeing(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path, Any]]:
    kind: str = request.param
    path = tmp_path_factory.mktemp("films") / kind
    model = save_seeing(path, kind)

    @cache
    def right(tokens: tuple[int, ...], which: tuple[Any, ...]) -> tuple[list[int], torch.Tensor]:
        ids = torch.tensor([tokens])
        films = [processed_film(kind, FILMS[each], RATES[each]) for each in which if each != "image"]
        given: dict[str, Any] = {
            "pixel_values_videos": torch.cat([each for each, *_ in films]), "video_grid_thw": torch.cat([grid for _, grid, _ in films])
        }
        given |= processed(kind, [PICTURE]) if "image" in which else {}
        own = iter(films)
        grids, intervals = list[tuple[int, int, int]](), list[float]()
        for each in which:
            grid, interval = (given["image_grid_thw"][0].tolist(), 1.0) if each == "image" else ((film := next(own))[1][0].tolist(), 4 * film[2])
            is_cut = kind != "grid" and each != "image"
            grids += [(1, *grid[1:])] * grid[0] if is_cut else [tuple(grid)]
            intervals += [interval] * (grid[0] if is_cut else 1)
        model.model.get_rope_index = lambda input_ids, **_: places_of(input_ids[0], grids, intervals)
        with torch.inference_mode():
            found = model.generate(
                input_ids=ids, mm_token_type_ids=(ids == IMAGE).long() + 2 * (ids == FILM).long(), **given, max_new_tokens=64,
                do_sample=False, eos_token_id=None, output_logits=True, return_dict_in_generate=True,
            )  # fmt: skip
        answer = found.sequences[0, len(tokens) :]
        return answer.tolist(), torch.cat(found.logits).log_softmax(-1).gather(1, answer[:, None])[:, 0]

    yield kind, path, right


def prompts(kind: str) -> list[dict[str, Any]]:
    found, marked = [], MARKED.get(kind, str)
    for which in ASKED:
        text = "<bos> d3 e4 " + " f5 ".join(marked(SEEN if each == "image" else SHOWN) for each in which) + " g6 h7"
        films = [(FILMS[each], RATES[each]) for each in which if each != "image"]
        found.append({"prompt": text, "multi_modal_data": {"video": films} | ({"image": PICTURE} if "image" in which else {})})
    return found


@pytest.mark.parametrize("settings", SETTINGS)
def test_answers_are_those_of_transformers(seeing: tuple[str, Path, Any], settings: str) -> None:
    kind, path, right = seeing
    with started(kind, path, settings, "float32") as llm:
        require_right(answered(llm, prompts(kind)), answered(llm, prompts(kind)), ASKED, right)


def test_no_number_depends_on_how_it_is_computed(seeing: tuple[str, Path, Any]) -> None:
    kind, path, _ = seeing
    found = []
    for settings in SETTINGS:
        with started(kind, path, settings, "bfloat16") as llm:
            found.append(answered(llm, prompts(kind)))
    assert all(each == found[0] for each in found), [each == found[0] for each in found]


def test_a_frame_that_changes_is_a_miss_from_its_pair_on(seeing: tuple[str, Path, Any]) -> None:
    """States that recur are kept where prompts end: of such a model nothing is left."""
    kind, path, _ = seeing
    changed = FILMS[0].copy()
    changed[12:] ^= 255
    with started(kind, path, "plain", "float32") as llm:
        first, same, other = (
            llm.generate({"prompt": MARKED.get(kind, str)(SHOWN) + " g6", "multi_modal_data": {"video": (film, RATES[0])}}, use_tqdm=False)[0]
            for film in (FILMS[0], FILMS[0], changed)
        )
    places = [at for at, token in enumerate(first.prompt_token_ids) if token == FILM]
    assert first.num_cached_tokens == 0 and same.num_cached_tokens > places[-1] - 8
    assert (0 if kind == "nets" else places[0] + 4) <= other.num_cached_tokens <= places[len(places) // 2]
