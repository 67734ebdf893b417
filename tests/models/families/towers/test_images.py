"""Images in an engine: tokens are transformers', for any chunk, rank count, hit and preemption, and a tile is computed once."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from engine_here import engines_here
from safetensors.torch import load_file
from tower_cases import IMAGE, SIDE, TILE_TOKENS, save_reader

from vnext import LLM
from vnext.media.pictures import MediaError
from vnext.media.pixels import PixelForm, numbers_of
from vnext.media.seen import Part, part_in
from vnext.media.store import FOLDER, MediaStore, digest_of, folder_of, kept_in
from vnext.models.config.model_config import load_config
from vnext.models.errors import ModelError
from vnext.models.layers.batch import ForwardBatch, InputPart
from vnext.models.layers.sharding import alone
from vnext.models.loading.weights import load_params
from vnext.replay.reading.index import Index
from vnext.replay.reading.source import open_log
from vnext.replay.ui.walk import Walk
from vnext.runtime.client.pending_operations import NotDone
from vnext.runtime.protocol.messages import SubmitRequest
from vnext.runtime.rank.images import Images
from vnext.state.events import pack_tokens, unpack_tokens
from vnext.state.params import Sampling
from vnext.state.store.fields import INPUT_BEGINS
from vnext.state.store.inputs import Input, input_tokens, with_inputs

TILES = np.random.default_rng(0).integers(0, 256, (3, SIDE, SIDE, 3), dtype=np.uint8)
FILES = [Part(each).file for each in TILES]
DIGESTS = [*map(digest_of, FILES)]
COUNT = 10
HERE: dict[str, Any] = {"dtype": "float32", "block_size": 4, "executor": "inproc", "threads": 1}


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, torch.nn.Module]:
    path = tmp_path_factory.mktemp("towers") / "reader"
    return path, save_reader(path)


def prompt_of(*tiles: int) -> tuple[list[int], np.ndarray]:
    """The tokens for transformers, and those of the engine."""
    tokens, inputs = [5, 6], []
    for tile in tiles:
        inputs.append(Input(len(tokens), TILE_TOKENS, DIGESTS[tile]))
        tokens += [IMAGE] * TILE_TOKENS + [7 + tile]
    tokens += [8, 9]
    return tokens, with_inputs(np.array(tokens, dtype=np.int32), inputs)


def right(model: Any, *tiles: int) -> list[int]:
    """transformers' greedy answer."""
    tokens, _ = prompt_of(*tiles)
    pixels = torch.from_numpy(numbers_of(TILES[list(tiles)], PixelForm()))[None]
    with torch.inference_mode():
        found = model.generate(
            input_ids=torch.tensor([tokens]), pixel_values=pixels, max_new_tokens=COUNT, do_sample=False, eos_token_id=None
        )
    return found[0, len(tokens) :].tolist()


def answers(llm: LLM, prompts: Sequence[np.ndarray]) -> tuple[list[list[int]], list[int]]:
    """The engine's answers, and the tokens that each found in the cache."""
    MediaStore([folder_of(llm._address)]).put(FILES, "the image")
    sampling, found = Sampling(seed=0, max_tokens=COUNT, temperature=0.0, ignore_eos=True), {str(at): [] for at in range(len(prompts))}
    hits = dict.fromkeys(found, 0)
    requests = [SubmitRequest(name=name, prompt=pack_tokens(each), sampling=sampling, has_seed=True) for name, each in zip(found, prompts)]
    for output in llm._client.run(requests):
        assert not output.error
        found[output.name] += unpack_tokens(output.tokens).tolist()
        hits[output.name] = max(hits[output.name], output.cached_tokens)
    return [*found.values()], [*hits.values()]


@pytest.mark.parametrize(
    "settings",
    [{}, {"max_num_batched_tokens": 7}, {"tensor_parallel_size": 2}, {"num_blocks_override": 14, "max_model_len": 52}, {"pipeline_parallel_size": 2}],
    ids=["plain", "chunks", "ranks", "preemption", "stages"],
)
def test_answers_are_those_of_transformers(reader: tuple[Path, torch.nn.Module], settings: dict[str, Any]) -> None:
    path, model = reader
    which = [(0,), (1, 0), (0,), (2,)]
    here = HERE if settings.keys().isdisjoint({"tensor_parallel_size", "pipeline_parallel_size"}) else HERE | {"executor": "mp"}
    with engines_here() if here is HERE else nullcontext(), LLM(str(path), **here, **settings) as llm:
        found, _ = answers(llm, [prompt_of(*tiles)[1] for tiles in which])
    assert found == [right(model, *tiles) for tiles in which]


def test_the_same_image_is_a_hit_and_another_one_is_none(reader: tuple[Path, torch.nn.Module]) -> None:
    with engines_here(), LLM(str(reader[0]), **HERE, log="off") as llm:
        first, hits = answers(llm, [prompt_of(0)[1]])
        again, same = answers(llm, [prompt_of(0)[1]])
        _, others = answers(llm, [prompt_of(1)[1]])
    assert first == again and hits == [0] and same == [20] and others == [0]


def test_an_image_at_the_end_is_of_the_prompt_alone(reader: tuple[Path, torch.nn.Module]) -> None:
    """The last token of a prompt that is in the cache is the image's; those after it are the answer's."""
    prompt = with_inputs(np.array([5, *[IMAGE] * TILE_TOKENS], np.int32), [Input(1, TILE_TOKENS, DIGESTS[0])])
    with engines_here(), LLM(str(reader[0]), **HERE, log="off") as llm:
        found = [answers(llm, [prompt]) for _ in range(2)]
    assert found[0][0] == found[1][0] and [hits for _, hits in found] == [[0], [TILE_TOKENS]]


def test_an_update_changes_what_reads_images_by_no_number(reader: tuple[Path, torch.nn.Module]) -> None:
    """A tower computes with the weights that it began with, so an update has these, in any dtype, or none of them."""
    own = load_file(reader[0] / "model.safetensors")
    tower = [name for name in own if "vision_model" in name or "connector" in name]
    changed = {name: each + 0.1 for name, each in own.items()}
    assert 0 < len(tower) < len(own)
    with engines_here(), LLM(str(reader[0]), **HERE, log="off") as llm:
        before, _ = answers(llm, [prompt_of(0)[1]])
        for name in (tower[0], tower[-1]):
            for update in (own | {name: changed[name]}, {name: changed[name]}):
                with pytest.raises(NotDone, match=f"the update in .* has another {name!r}, which reads images or sounds"):
                    llm.update_weights(update, partial=len(update) == 1)
        assert answers(llm, [prompt_of(0)[1]])[0] == before
        llm.update_weights(changed | {name: own[name].double().float() for name in tower})
        assert answers(llm, [prompt_of(0)[1]])[0] != before
        llm.update_weights({name: each for name, each in own.items() if name not in tower})
        llm.sleep(), llm.wake_up()
        assert answers(llm, [prompt_of(0)[1]])[0] == before
    with engines_here(), LLM(str(reader[0]), **HERE, log="off", load_format="dummy") as llm:
        with pytest.raises(NotDone, match="which reads images or sounds"):
            llm.update_weights(own)


def test_a_step_encodes_one_tile(reader: tuple[Path, torch.nn.Module], tmp_path: Path) -> None:
    path, model = reader
    which = [(0, 1, 2), (1, 0), (2,)]
    with engines_here(), LLM(str(path), **HERE, log_dir=str(tmp_path)) as llm:
        found, _ = answers(llm, [prompt_of(*tiles)[1] for tiles in which])
        log = llm.log_dir
    assert found == [right(model, *tiles) for tiles in which]
    walk, begun = Walk(Index(open_log(Path(log)))), []
    for step in range(walk.index.first.planned, walk.last_step + 1):
        after = walk.moment(step).after
        begun.append(0)
        for id_, start, count in zip(*(getattr(after.in_flight[-1], name).tolist() for name in ("ids", "starts", "counts"))):
            prompt = unpack_tokens(after.requests[id_].prompt)[start : start + count]
            begun[-1] += int((prompt < INPUT_BEGINS).sum())
    assert max(begun) == 1 and sum(begun) == 6


def test_a_damaged_image_is_refused_once(tmp_path: Path) -> None:
    """Whoever sends it again has it written anew."""
    store = MediaStore([tmp_path])
    (digest,) = store.put(FILES[:1], "the image")
    (tmp_path / digest.hex()).write_bytes(FILES[0][:-1])
    with pytest.raises(MediaError, match="is damaged"):
        kept_in(tmp_path, digest, "image")
    assert store.put(FILES[:1], "the image") == [digest] and kept_in(tmp_path, digest, "image") == FILES[0]


def test_a_tile_is_computed_once_and_whole(reader: tuple[Path, torch.nn.Module], tmp_path: Path) -> None:
    path, _ = reader
    config = load_config(path)
    params = load_params(path, config, alone(), torch.float32, "cpu")
    MediaStore([tmp_path]).put(FILES, "the image")
    images = Images(path, config, torch.float32, tmp_path, kept_bytes=2 * TILE_TOKENS * config.hidden_size * 4)

    def states(tile: int, first: int, count: int) -> torch.Tensor:
        tokens = torch.from_numpy(input_tokens(DIGESTS[tile], TILE_TOKENS)[first : first + count].astype(np.int64))
        batch = ForwardBatch(tokens, *[None] * 6, inputs=(InputPart(0, count, DIGESTS[tile], first),))
        return images.with_vectors(batch, params, alone()).states

    whole = states(0, 0, TILE_TOKENS)
    assert torch.equal(torch.cat([states(0, at, 3) for at in range(0, 15, 3)]), whole[:15]) and images.computed == TILE_TOKENS
    states(1, 0, 4), states(0, 0, 4), states(2, 0, 4), states(0, 0, 4)
    assert images.computed == 3 * TILE_TOKENS
    assert torch.equal(states(1, 0, 4), states(1, 0, 4)) and images.computed == 4 * TILE_TOKENS
    (tmp_path / DIGESTS[2].hex()).write_bytes(b"torn")
    with pytest.raises(ModelError, match="is damaged"):
        states(2, 0, 4)


def test_a_store_has_a_bound_and_notices_damage(tmp_path: Path) -> None:
    folder = tmp_path / FOLDER
    store = MediaStore([folder], room_bytes=2 * len(FILES[0]))
    store.put(FILES[:2], "one")
    store.put(FILES[:2], "one")
    assert np.array_equal(part_in(kept_in(folder, DIGESTS[1], "image")).pixels, TILES[1]) and len([*folder.iterdir()]) == 2
    with pytest.raises(MediaError, match=r"^two cannot be kept here: what came in the last minutes has taken all room$"):
        store.put(FILES[2:], "two")
    (folder / "part-1").symlink_to("renamed")  # one that another API server has renamed has a name and no size
    store.put(FILES[:1], "one")
    file = folder / DIGESTS[0].hex()
    file.write_bytes(bytes(TILES[0].nbytes))
    with pytest.raises(MediaError, match="is damaged"):
        kept_in(folder, DIGESTS[0], "image")
