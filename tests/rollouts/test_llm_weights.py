"""LLM.update_weights: the tokens of a fresh engine, nothing stale, nothing changed by a wrong update; pauses, sleep and calls."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from typing import Any

import pytest
import torch
from changing_engine import Tensors, made
from engine_here import engines_here
from safetensors.torch import save_file
from saved_adapters import DEMO, save_adapter

from vnext.api.llm import LLM
from vnext.replay.cli.main import main as replay
from vnext.runtime.client.connection import weights_folder
from vnext.runtime.client.pending_operations import BadTensors, NotDone
from vnext.runtime.protocol.lora_request import LoRARequest
from vnext.runtime.protocol.operations import SharedTensor
from vnext.runtime.protocol.sampling_params import SamplingParams

PROMPTS = ["The module", "What is", "Return the", "A list of numbers that", "def main"]
GREEDY = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
NUMBERS = {
    "float32": {"dtype": "float32"}, "bfloat16": {"dtype": "bfloat16"}, "int8": {"dtype": "bfloat16", "quantization": "int8"},
    "int8 cache": {"dtype": "bfloat16", "kv_cache_dtype": "int8"},
}  # fmt: skip


@pytest.fixture(scope="module")
def checkpoint(new: Tensors, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The new weights as a checkpoint."""
    folder = tmp_path_factory.mktemp("new") / "demo"
    shutil.copytree(DEMO, folder)
    save_file(new, folder / "model.safetensors")
    return folder


def tokens_of(llm: LLM, prompts: list[str] = PROMPTS, params: SamplingParams = GREEDY) -> list[list[int]]:
    return [each.outputs[0].token_ids for each in llm.generate(prompts, params, False)]


@pytest.mark.parametrize("numbers", NUMBERS.values(), ids=NUMBERS)
def test_the_tokens_are_those_of_a_fresh_engine(numbers, old, new, checkpoint, tmp_path):
    with engines_here(), made(tmp_path, **numbers) as llm:
        before = tokens_of(llm)
        changed = llm.update_weights(new)
        after = tokens_of(llm)
        assert changed["version"] == 1 and llm.collective_rpc("weights_digest") == [changed["digest"]]
        assert llm.update_weights(str(DEMO))["version"] == 2 and tokens_of(llm) == before
        assert llm.update_weights(new, version=7) == {"version": 7, "digest": changed["digest"]} and tokens_of(llm) == after
    with engines_here(), made(model=str(checkpoint), **numbers) as fresh:
        assert tokens_of(fresh) == after != before
        assert fresh.collective_rpc("weights_digest") == [changed["digest"]], "of a checkpoint with the same tensors"
    assert replay(["verify", "--laws", llm.log_dir]) == 0


def test_a_head_that_is_the_embedding_may_come_too(new, checkpoint):
    """State dicts name both."""
    head = {"lm_head.weight": new["model.embed_tokens.weight"].clone()}
    with engines_here(), made(dtype="float32") as llm:
        digest = llm.update_weights(new)["digest"]
        assert llm.update_weights(new | head)["digest"] == digest
        other = {"lm_head.weight": head["lm_head.weight"].flip(0)}
        for update, is_partial in ((new | other, False), (other, True)):
            with pytest.raises(NotDone, match="'lm_head.weight' unlike 'model.embed_tokens.weight', and this model's head is"):
                llm.update_weights(update, partial=is_partial)
        assert llm.residence.digest == digest


def test_two_ranks_in_processes_of_their_own(new, checkpoint, tmp_path):
    with made(tmp_path, executor="mp", tensor_parallel_size=2, dtype="float32", digest_interval=1) as llm:
        before, changed = tokens_of(llm), llm.update_weights(new.items())
        after = tokens_of(llm)
        with pytest.raises(NotDone, match="lacks"):
            llm.update_weights(dict(list(new.items())[1:]))
        assert tokens_of(llm) == after
        assert len(llm.collective_rpc("process_id")) == 2 and llm.residence.version == 1
        llm.update_weights(new)
        assert len(list(weights_folder(llm._address).glob("weights.*"))) == 1, "the file of the version in use, and no other"
        llm.sleep()
        assert llm.residence.asleep == ("weights", "kv_cache")
        llm.wake_up()
        assert tokens_of(llm) == after
    with engines_here(), made(model=str(checkpoint), dtype="float32") as fresh:
        assert tokens_of(fresh) == after != before
        assert fresh.collective_rpc("weights_digest") == [changed["digest"]]
    assert replay(["verify", "--laws", llm.log_dir]) == 0


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with engines_here(), made(dtype="float32") as running:
        yield running


def test_cached_blocks_of_old_weights_are_no_hits(llm, old, new):
    prompt = list(range(5, 70))
    llm.generate(prompt, GREEDY, False)
    assert llm.generate(prompt, GREEDY, False)[0].num_cached_tokens >= 48
    for weights in (new, old):
        llm.update_weights(weights)
        assert llm.generate(prompt, GREEDY, False)[0].num_cached_tokens == 0
        assert llm.generate(prompt, GREEDY, False)[0].num_cached_tokens >= 48


NORM = "model.norm.weight"
WRONG: dict[str, tuple[Any, str]] = {
    "missing": (lambda new: {name: each for name, each in new.items() if name != NORM}, "lacks 'model.norm.weight'.*is partial"),
    "half sent": (lambda new: dict(list(new.items())[: len(new) // 2]), "lacks .* and .* more: send every tensor"),
    "unknown": (lambda new: new | {"extra.weight": torch.zeros(3)}, "has 'extra.weight', which this model does not"),
    "shape": (lambda new: new | {NORM: torch.zeros(255)}, r"shape \[255\] where the model has \[256\]"),
    "dtype": (lambda new: new | {NORM: torch.zeros(256, dtype=torch.int64)}, "has the dtype I64; supported are F32, F16, BF16"),
    "nan": (lambda new: new | {NORM: torch.full((256,), torch.nan)}, "'model.norm.weight' .* not finite"),
    "infinity": (lambda new: new | {NORM: torch.full((256,), torch.inf)}, "'model.norm.weight' .* not finite"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_update_is_one_sentence_and_changes_nothing(llm, new, name):
    before, residence = tokens_of(llm), llm.residence
    wrong, sentence = WRONG[name]
    with pytest.raises(NotDone, match=sentence) as caught:
        llm.update_weights(wrong(new))
    assert "\n" not in str(caught.value) and str(caught.value).endswith("nothing has changed")
    assert tokens_of(llm) == before and llm.residence == residence
    assert not list(weights_folder(llm._address).glob("*.part"))


def test_files_that_are_no_weights(llm, tmp_path, new):
    with pytest.raises(NotDone, match="there are no weights at"):
        llm.update_weights(tmp_path / "nowhere")
    torn = tmp_path / "torn.safetensors"
    save_file(new, torn)
    torn.write_bytes(torn.read_bytes()[:-100])
    with pytest.raises(NotDone, match="truncated or corrupt"):
        llm.update_weights(torn)
    with pytest.raises(NotDone, match="versions grow"):
        llm.update_weights(new, version=-1)
    with pytest.raises(BadTensors, match="'x' is a list"):
        llm.update_weights({"x": [1.0]})
    with pytest.raises(BadTensors, match="given twice"):
        llm.update_weights([(NORM, new[NORM]), (NORM, new[NORM])])


def test_weights_in_shared_memory(llm, old, new):
    size = sum(each.numel() * 4 for each in new.values())
    memory, tensors, at = SharedMemory(create=True, size=size), [], 0
    try:
        for name, each in new.items():
            data = each.float().numpy()
            memory.buf[at : at + data.nbytes] = data.tobytes()
            tensors.append(SharedTensor(name=name, dtype="float32", shape=list(data.shape), segment=memory.name, offset=at))
            at += data.nbytes
        llm.update_weights(tensors)
        shared = tokens_of(llm)
        llm.update_weights({name: each.float().numpy() for name, each in new.items()})
        assert tokens_of(llm) == shared
        for change, sentence in (
            ({"offset": size}, "ends behind"), ({"segment": "../etc"}, "no name of shared memory"),
            ({"segment": "none"}, "cannot be read"), ({"dtype": "complex64"}, "has dtype 'complex64'"),
        ):  # fmt: skip
            wrong = SharedTensor(**{"name": NORM, "dtype": "float32", "shape": [256], "segment": memory.name} | change)
            with pytest.raises(BadTensors, match=sentence):
                llm.update_weights([wrong])
    finally:
        memory.close(), memory.unlink()
    llm.update_weights(old)


def test_sleep_gives_memory_back_and_level_2_forgets(llm, old):
    before, (awake,) = tokens_of(llm), llm.collective_rpc("resident_bytes")
    llm.sleep(1)
    asleep = llm.residence
    assert asleep.paused == "sleep" and asleep.asleep == ("weights", "kv_cache") and asleep.resident_bytes < awake - 4e6
    for refused in (llm.resume, llm.pause):
        with pytest.raises(NotDone, match="wake_up"):
            refused()
    llm.wake_up(["weights"])
    assert llm.residence.asleep == ("kv_cache",)
    llm.wake_up(["kv_cache"])
    assert tokens_of(llm) == before and llm.residence.paused == ""
    llm.sleep(level=2)
    with pytest.raises(NotDone, match="discarded by sleep"):
        llm.wake_up()
    llm.update_weights(old), llm.wake_up()
    assert tokens_of(llm) == before
    with pytest.raises(NotDone, match="level is 3"):
        llm.sleep(3)


def test_calls_by_name(llm):
    assert llm.collective_rpc("weight_names")[0][NORM] == [256]
    with pytest.raises(NotDone, match="no function 'exec'.*process_id"):
        llm.collective_rpc("exec")
    with pytest.raises(NotDone, match="code is not sent"):
        llm.collective_rpc(lambda rank: rank)
    with pytest.raises(NotDone, match="arguments by name"):
        llm.collective_rpc("process_id", args=(1,))
    with pytest.raises(NotDone, match="unexpected keyword"):
        llm.collective_rpc("process_id", kwargs={"x": 1})


def test_adapters_go_on_over_the_new_weights(new, checkpoint, tmp_path):
    adapter = LoRARequest("tenant", 1, str(save_adapter(DEMO, tmp_path / "adapter", 2, rank=8, lora_alpha=1)))
    settings = {"enable_lora": True, "max_lora_rank": 16, "dtype": "float32"}

    def found(llm: LLM) -> list[list[int]]:
        return [each.outputs[0].token_ids for each in llm.generate(PROMPTS, GREEDY, False, adapter)]

    with engines_here(), made(**settings) as llm:
        before = found(llm)
        llm.update_weights(new)
        after = found(llm)
    with engines_here(), made(model=str(checkpoint), **settings) as fresh:
        assert found(fresh) == after != before


def test_files_that_have_changed_since_do_not_wake_up(tmp_path, new):
    with engines_here(), made(dtype="float32") as llm:
        path = tmp_path / "weights.safetensors"
        save_file(new, path)
        llm.update_weights(path)
        llm.sleep()
        save_file({name: each * 2 for name, each in new.items()}, path)
        with pytest.raises(NotDone, match="have changed"):
            llm.wake_up()
        assert llm.residence.paused == "sleep"
