"""Families that read images: answers and logits are transformers', and the same for any chunks, ranks, hits, preemption and drafts."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from engine_here import engines_here
from safetensors.numpy import load_file, save_file
from seeing_cases import CASES, GRIDS, IMAGE, MARKS, processed, save_seeing

from vnext import LLM, SamplingParams
from vnext.media.vectors import VectorFiles
from vnext.models.config.model_config import load_config
from vnext.models.loading.unread import unread
from vnext.replay.cli.main import main as replay
from vnext.runtime.engine import process
from vnext.runtime.protocol.sampling_params import InvalidRequest

COUNT = 64
GREEDY = SamplingParams(temperature=0, max_tokens=COUNT, ignore_eos=True, logprobs=1)
RNG = np.random.default_rng(3)
PICTURES = [RNG.integers(0, 256, (*size, 3), dtype=np.uint8) for size in ((32, 32), (40, 61), (90, 33), (7, 50), (120, 118))]
WHICH: tuple[tuple[int, ...], ...] = ((1,), (0,), (2,), (3, 1), (4,), (1,), (4, 2, 0))
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {}, "chunks": {"max_num_batched_tokens": 7}, "ranks": {"tensor_parallel_size": 2},
    "preemption": {"num_blocks_override": 110, "max_model_len": 400},
    "units": {"input_tokens": 2},
    "drafts": {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}},
}  # fmt: skip
WINDOWED = {"whole": {"max_model_len": 200}, "deep_parallel": {"max_model_len": 352, "num_blocks_override": 180}}
"""With two groups of layers, which have half the tokens in as many pages: in few pages prompts are shorter, or there are more."""


@pytest.fixture(scope="module", params=CASES)
def seeing(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path, Any]:
    path = tmp_path_factory.mktemp("seeing") / request.param
    model = save_seeing(path, request.param)

    @cache
    def right(tokens: tuple[int, ...], which: tuple[int, ...]) -> tuple[list[int], torch.Tensor]:
        """transformers' greedy answer, and the log-probabilities of its tokens."""
        ids = torch.tensor([tokens])
        kinds = {"whole": "token_type_ids", **dict.fromkeys(GRIDS, "mm_token_type_ids")}
        more = {kinds[request.param]: (ids == IMAGE).long()} if request.param in kinds else {}
        with torch.inference_mode():
            found = model.generate(
                input_ids=ids, **more, **processed(request.param, [PICTURES[each] for each in which]), max_new_tokens=COUNT,
                do_sample=False, eos_token_id=None, output_logits=True, return_dict_in_generate=True,
            )  # fmt: skip
        answer = found.sequences[0, len(tokens) :]
        return answer.tolist(), torch.cat(found.logits).log_softmax(-1).gather(1, answer[:, None])[:, 0]

    return request.param, path, right


@contextmanager
def started(kind: str, path: Path, settings: str, dtype: str) -> Iterator[LLM]:
    """In this process, but for several ranks."""
    more = SETTINGS[settings] | (WINDOWED.get(kind, {}) if settings == "preemption" else {})
    executor = "mp" if "tensor_parallel_size" in more else "inproc"
    with engines_here() if executor == "inproc" else nullcontext():
        with LLM(str(path), dtype=dtype, block_size=4, threads=1, executor=executor, **more) as llm:
            yield llm


def prompts_of(kind: str) -> list[dict[str, Any]]:
    mark = MARKS.get(kind, CASES[kind].words[0])
    texts = ("<bos> d3 e4 " + " f5 ".join([mark] * len(which)) + " g6 h7" for which in WHICH)
    return [{"prompt": text, "multi_modal_data": {"image": [PICTURES[at] for at in which]}} for text, which in zip(texts, WHICH)]


def answered(
    llm: LLM, prompts: Sequence[Any], params: SamplingParams = GREEDY
) -> tuple[list[tuple[int, ...]], list[list[int]], list[list[float]]]:
    """Of each prompt: its tokens, those of the answer, and their log-probabilities."""
    outputs = llm.generate(prompts, params, use_tqdm=False)
    answers = [list(each.outputs[0].token_ids) for each in outputs]
    logprobs = [[row[token].logprob for row, token in zip(each.outputs[0].logprobs, each.outputs[0].token_ids)] for each in outputs]
    return [tuple(each.prompt_token_ids) for each in outputs], answers, logprobs


def require_right(first: Any, again: Any, asked: Sequence[Any], right: Callable[..., tuple[list[int], torch.Tensor]]) -> None:
    """What `answered` gives for prompts with these inputs, and once more: transformers' tokens and log-probabilities."""
    tokens, answers, logprobs = first
    assert again == first, "of what the cache has"
    for prompt, which, answer, given in zip(tokens, asked, answers, logprobs):
        expected, theirs = right(prompt, which)
        assert answer == expected
        torch.testing.assert_close(torch.tensor(given), theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("settings", SETTINGS)
def test_answers_are_those_of_transformers(seeing: tuple[str, Path, Any], settings: str) -> None:
    kind, path, right = seeing
    with started(kind, path, settings, "float32") as llm:
        require_right(answered(llm, prompts_of(kind)), answered(llm, prompts_of(kind)), WHICH, right)


def test_stages_answer_as_one_process_does(seeing: tuple[str, Path, Any]) -> None:
    """Where images join several layers these are the first stage's."""
    kind, path, _ = seeing
    refused = {"whole": (2, "sees images to both sides is not cut into stages"), "deep": (3, "join 2 layers, the first stage has 1")}
    if kind in refused:
        stages, why = refused[kind]
        with pytest.raises(Exception, match=why):
            LLM(str(path), dtype="float32", threads=1, pipeline_parallel_size=stages, log="off")
    if kind in ("grid", "deep"):
        common: dict[str, Any] = {"dtype": "float32", "block_size": 4, "threads": 1, "log": "off"}
        with engines_here(), LLM(str(path), **common, executor="inproc") as llm:
            one = answered(llm, prompts_of(kind))
        with LLM(str(path), **common, pipeline_parallel_size=2, max_num_batched_tokens=50) as llm:
            assert answered(llm, prompts_of(kind)) == one


def test_hits_reach_behind_images(seeing: tuple[str, Path, Any]) -> None:
    """Also of states that recur."""
    kind, path, _ = seeing
    with started(kind, path, "plain", "float32") as llm:
        prompt = prompts_of(kind)[-1]
        first, again = (llm.generate(prompt, GREEDY, use_tqdm=False)[0] for _ in range(2))
    images = [at for at, token in enumerate(first.prompt_token_ids) if token == IMAGE]
    assert first.num_cached_tokens == 0 and again.num_cached_tokens > images[-1] - 4
    assert again.outputs[0].token_ids == first.outputs[0].token_ids


def test_no_number_depends_on_how_it_is_computed(seeing: tuple[str, Path, Any]) -> None:
    kind, path, _ = seeing
    found = []
    for settings in SETTINGS:
        with started(kind, path, settings, "bfloat16") as llm:
            found.append(answered(llm, prompts_of(kind)))
    assert all(each == found[0] for each in found), [each == found[0] for each in found]


def test_a_copy_for_texts_alone_reads_no_images(seeing: tuple[str, Path, Any], tmp_path: Path) -> None:
    kind, path, _ = seeing
    shutil.copytree(path, tmp_path, dirs_exist_ok=True)
    tensors = load_file(path / "model.safetensors")
    save_file({name: each for name, each in tensors.items() if not name.startswith(("visual", "model.visual", "vision", "multi_modal", "image"))}, tmp_path / "model.safetensors")
    text = "<bos> d3 e4"
    options = {"dtype": "float32", "threads": 1, "executor": "inproc"}
    with engines_here(), LLM(str(path), **options) as llm, LLM(str(tmp_path), **options) as other:
        assert answered(other, [text]) == answered(llm, [text])
        with pytest.raises(InvalidRequest, match="This model reads no images"):
            other.generate(prompts_of(kind)[0], GREEDY)


def test_all_of_the_checkpoint_is_read(seeing: tuple[str, Path, Any]) -> None:
    assert unread(seeing[1]) == ""


class Tier(NamedTuple):
    """Where vectors of inputs are kept: the settings of an engine that keeps them there, and the options of a command."""

    folder: Path
    settings: dict[str, Any]
    given: list[str]


def recorded(path: Path, tmp_path: Path, prompts: Sequence[Any], **more: Any) -> str:
    """The log of answers to these prompts."""
    settings = {"dtype": "float32", "block_size": 4, "threads": 1, "executor": "inproc", "log": "full", "log_dir": str(tmp_path)}
    with engines_here(), LLM(str(path), **settings | more) as llm:
        for prompt in prompts:
            answered(llm, [prompt] if isinstance(prompt, str) else prompt)
        return str(llm.log_dir)


@pytest.fixture
def tier(seeing: tuple[str, Path, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Tier:
    """A model with windows has no disk tier, and vectors where an engine that only encodes has them."""
    folder, settings_of = tmp_path / "tier", process.handover_settings
    if seeing[0] not in WINDOWED:
        return Tier(folder, {"kv_disk_dir": str(folder)}, [])
    there = {"inputs_dir": str(folder), "inputs_bytes": 10**9}
    monkeypatch.setattr(process, "handover_settings", lambda settings: settings_of(settings) | there)
    return Tier(folder, {}, ["--inputs", str(folder)])


def test_a_log_is_run_again_where_inputs_were_kept(seeing: tuple[str, Path, Any], tmp_path: Path, tier: Tier) -> None:
    """What the first engine has encoded the second one finds, and blocks behind images are hits."""
    kind, path, _ = seeing
    settings: tuple[dict[str, Any], ...] = ({"max_num_batched_tokens": 11, "input_tokens": 2}, {})
    first, second = (recorded(path, tmp_path, [prompts_of(kind)], **tier.settings, **more) for more in settings)
    for command in (
        ["exec", first], ["exec", second], ["exec", second, "--solo", "--requests", "1,3"],
        ["exec", second, "--steps", ":9", "--tp", "2"], ["audit", second, "--sample", "0.05", "--seed", "1"],
    ):  # fmt: skip
        assert replay([*command, *tier.given]) == 0, command
    refused = kind == "whole" or load_config(path).recurrent is not None  # bisect computes no operation twice
    assert replay(["bisect", second, "--solo", "--steps", ":9", *tier.given]) == (2 if refused else 0)


def test_vectors_are_those_of_the_log_or_nothing_is_run(
    seeing: tuple[str, Path, Any], tmp_path: Path, tier: Tier, capsys: pytest.CaptureFixture[str]
) -> None:
    kind, path, _ = seeing
    log, copy = recorded(path, tmp_path, [prompts_of(kind)[:2]], **tier.settings), ["--inputs", str(tmp_path / "copy")]
    shutil.copytree(tier.folder, tmp_path / "copy")
    assert replay(["exec", log, *copy]) == 0
    found = sorted(tier.folder.glob("inputs-*/*"))
    files = VectorFiles(tmp_path / "copy", json.loads(found[0].parent.with_suffix(".json").read_text()), 10**9)
    for each in found:
        right = files.read(digest := bytes.fromhex(each.name))
        assert right is not None
        (files.folder / each.name).unlink()
        files.write(digest, right._replace(rows=(right.rows.view(np.float32) * 2).view(np.uint8)))
    assert replay(["exec", log, *copy]) == 1, "whole, and another's"
    path, whole = files.folder / found[0].name, found[0].read_bytes()
    for file, why in ((whole[:-1], "is damaged"), (whole[:-1] + bytes([whole[-1] ^ 1]), "is damaged"), (None, "are not in")):
        path.unlink() if file is None else path.write_bytes(file)
        capsys.readouterr()
        for command in ("exec", "audit"):
            assert replay([command, log, *copy]) == 2
            said = capsys.readouterr().err
            assert path.name in said and why in said and "--kv-disk-dir" in said
        assert file is None or path.read_bytes() == file, "nothing is removed"
    files.folder.rename(files.folder.with_name(f"inputs-{bytes(16).hex()}"))
    assert replay(["exec", log, *copy]) == 2
    assert "has none of the log's model, version and numbers" in capsys.readouterr().err


def test_a_log_is_run_again_but_for_images(seeing: tuple[str, Path, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kind, path, _ = seeing
    log = recorded(path, tmp_path, ["<bos> d3 e4", prompts_of(kind)])
    assert replay(["verify", "--laws", log]) == 0
    assert replay(["exec", log, "--steps", f":{COUNT // 2}"]) == 0
    for command in (["exec", log], ["audit", log]):
        capsys.readouterr()
        assert replay(command) == 2, command
        assert "whose vectors are not kept (the log names no disk tier): give the folder" in capsys.readouterr().err
    assert replay(["rollouts", log, "-o", str(tmp_path / "out.jsonl"), "--json"]) == 0
    written, lines = json.loads(capsys.readouterr().out), (tmp_path / "out.jsonl").read_text().splitlines()
    assert (written["rollouts"], written["with_inputs"], len(lines)) == (1, len(prompts_of(kind)), 1)
