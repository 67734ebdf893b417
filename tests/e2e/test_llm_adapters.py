"""LLM with LoRA adapters: the merged model's tokens, the same bits in any company, more adapters than slots, and bad input."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from engine_here import engines_here
from saved_adapters import DEMO, merge, save_adapter

from vnext.api.llm import LLM, Generated
from vnext.models.config.adapter_config import adapter_digest
from vnext.models.layers.adapted import Adapter
from vnext.replay.cli.main import main as replay
from vnext.runtime.protocol.lora_request import LoRARequest
from vnext.runtime.protocol.sampling_params import InvalidRequest, SamplingParams
from vnext.runtime.rank import adapters as rank_adapters
from vnext.runtime.rank.adapters import AdapterSlots
from vnext.state.events import AdapterEvicted, AdapterLoaded

PROMPTS = ["The module", "What is", "Return the", "A list of numbers that", "The module is", "def main"]
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, logprobs=1)
SEEDED = SamplingParams(temperature=0.8, seed=7, max_tokens=24, ignore_eos=True, logprobs=1)
BLOCKS = 200
"""All laws look at every block after every event: with as many as fit the memory, they would take most of the time."""
TINY = {"num_blocks_override": 17, "max_model_len": 64, "max_num_batched_tokens": 40, "long_prefill_token_threshold": 3, "block_size": 4}
CHOICES = {
    "usual": {}, "one slot": {"max_loras": 1}, "tiny": TINY, "no cache": {"enable_prefix_caching": False},
    "sync": {"async_scheduling": False}, "bfloat16": {"dtype": "bfloat16"}, "int8": {"quantization": "int8", "dtype": "bfloat16"},
}  # fmt: skip


@pytest.fixture(scope="module", params=CHOICES)
def llm(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    settings: dict[str, Any] = {"max_loras": 2, "dtype": "float32", "num_blocks_override": BLOCKS, **CHOICES[request.param]}
    with engines_here(), LLM(
        executor="inproc", threads=1, enable_lora=True, max_lora_rank=16, check_laws=True, digest_interval=1, log="full",
        log_dir=str(tmp_path_factory.mktemp("log")), **settings,
    ) as made:  # fmt: skip
        yield made
    assert replay(["verify", "--laws", made.log_dir]) == 0


def answers(found: list[Generated]) -> list[tuple[list[int], Any]]:
    return [(each.outputs[0].token_ids, each.outputs[0].logprobs) for each in found]


@pytest.mark.parametrize("params", [GREEDY, SEEDED], ids=["greedy", "seeded"])
def test_mixed_batches_have_the_bits_of_each_request_alone(llm: LLM, adapters: list[LoRARequest], params: SamplingParams) -> None:
    prompts = [prompt for prompt in PROMPTS for _ in range(6)]
    each = [None, *adapters] * len(PROMPTS)
    together = answers(llm.generate(prompts, params, False, each))
    assert len({tuple(tokens) for tokens, _ in together}) > len(PROMPTS), "adapters change answers"
    for place in range(0, len(prompts), 5):
        alone = llm.generate([prompts[place]], params, False, each[place])
        assert answers(alone) == [together[place]]
    assert answers(llm.generate(prompts[::-1], params, False, each[::-1])) == together[::-1]


def test_the_merged_model_gives_the_same_tokens(adapters: list[LoRARequest], tmp_path: Path) -> None:
    settings = {"executor": "inproc", "threads": 1, "dtype": "float32", "log": "off"}
    with engines_here(), LLM(enable_lora=True, max_lora_rank=16, **settings) as llm:
        found = llm.generate(PROMPTS, GREEDY, False, adapters[3])
        vectors, scores = llm.embed(PROMPTS, lora_request=adapters[3]), llm.score(PROMPTS, PROMPTS, lora_request=adapters[3])
        assert vectors != llm.embed(PROMPTS) and vectors[:1] == llm.embed(PROMPTS[:2], lora_request=[adapters[3], None])[:1]
    merged = merge(DEMO, Path(adapters[3].lora_path), tmp_path / "merged")
    with engines_here(), LLM(str(merged), **settings) as llm:
        expected = llm.generate(PROMPTS, GREEDY, False)
        for one, other in zip(vectors, llm.embed(PROMPTS)):
            assert one.outputs.embedding == pytest.approx(other.outputs.embedding, abs=1e-5)
        for one, other in zip(scores, llm.score(PROMPTS, PROMPTS)):
            assert one.logprobs == pytest.approx(other.logprobs, abs=1e-4)
    assert [each.outputs[0].token_ids for each in found] == [each.outputs[0].token_ids for each in expected]
    for one, other in zip(found, expected):
        pairs = zip(one.outputs[0].logprobs, other.outputs[0].logprobs)
        assert all(a[token].logprob == pytest.approx(b[token].logprob, abs=1e-4) for a, b in pairs for token in a.keys() & b.keys())


def test_bad_input_harms_nobody(adapters: list[LoRARequest], tmp_path: Path) -> None:
    with engines_here(), LLM(executor="inproc", threads=1, log="off") as llm:
        with pytest.raises(InvalidRequest, match="serves no adapters: make it with LLM"):
            llm.generate("The", GREEDY, False, adapters[0])
    with engines_here(), LLM(executor="inproc", threads=1, log="off", enable_lora=True, max_lora_rank=8) as llm:
        for request, sentence in (
            (LoRARequest("a", 1, str(tmp_path)), "has no adapter_config.json"),
            (adapters[4], "has the rank 14, more than --max-lora-rank 8"),
            (LoRARequest("", 1, "x"), "needs a lora_name and a lora_path"),
            ([adapters[0]] * 2, "There are 1 prompts and 2 lora_requests"),
        ):
            with pytest.raises(InvalidRequest, match=sentence):
                llm.generate(["The"], GREEDY, False, request)
        wrong = save_adapter(DEMO, tmp_path / "wrong", targets=("embed_tokens",))
        with pytest.raises(InvalidRequest, match="adapts .*embed_tokens"):
            llm.generate(["The"], GREEDY, False, LoRARequest("wrong", 1, str(wrong)))
        folder = save_adapter(DEMO, tmp_path / "changing")
        first = llm.generate(["The"], GREEDY, False, LoRARequest("c", 1, str(folder)))
        assert answers(llm.generate(["The"], GREEDY, False, adapters[0])) != answers(first)
        assert answers(llm.generate(["The"], GREEDY, False, LoRARequest("c", 1, str(folder)))) == answers(first)


def test_an_adapter_is_read_once_for_each_load(adapters: list[LoRARequest], monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where two are missing at once: the one that was read takes its slot before the next is asked for."""
    read, loaded = [], []

    def fold(slots: AdapterSlots, event: AdapterLoaded | AdapterEvicted) -> None:
        loaded.extend([event.digest] if isinstance(event, AdapterLoaded) else [])
        folds(slots, event)

    def load(*arguments: Any) -> Adapter:
        read.append(arguments[1])
        return loads(*arguments)

    folds, loads = AdapterSlots.fold, rank_adapters.load_adapter
    monkeypatch.setattr(AdapterSlots, "fold", fold)
    monkeypatch.setattr(rank_adapters, "load_adapter", load)
    with engines_here(), LLM(executor="inproc", threads=1, log="off", enable_lora=True, max_loras=3, max_lora_rank=16) as llm:
        llm.generate(["The"] * 10, GREEDY, False, adapters * 2)
    assert read == loaded and set(read) == {adapter_digest(Path(each.lora_path)) for each in adapters}


def test_files_that_change_behind_a_name(adapters: list[LoRARequest], tmp_path: Path) -> None:
    """The adapter is never another one than was named: its digest is compared again when it is read."""
    folder = save_adapter(DEMO, tmp_path / "a", 1)
    name = LoRARequest("a", 1, str(folder))
    with engines_here(), LLM(executor="inproc", threads=1, log="off", enable_lora=True, max_loras=1, max_lora_rank=16) as llm:
        first = answers(llm.generate(["The"], GREEDY, False, name))
        llm.generate(["The"], GREEDY, False, adapters[0])
        save_adapter(DEMO, folder, 2)
        with pytest.raises(InvalidRequest, match="has changed since it was named"):
            llm.generate(["The"], GREEDY, False, name)
        again = msgspec.structs.replace(name, lora_int_id=2)
        assert answers(llm.generate(["The"], GREEDY, False, again)) != first
