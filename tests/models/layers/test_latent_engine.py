"""Models with latent attention, unlike layers or runs in the engine: the same tokens in any chunks, with hits, and when ranks die."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest
import tokenizers
import torch
from family_cases import VOCAB_SIZE, save_case

from tests.e2e.serving import in_background
from tests.run.stops import Stops, stops  # noqa: F401  (a fixture)
from vnext import LLM, SamplingParams
from vnext.models.config.model_config import load_config
from vnext.models.errors import ModelError
from vnext.models.layers.kv_cache import kv_bytes_per_page, make_kv_cache, page_rows
from vnext.models.layers.sharding import Parallel, alone

TOKEN_COUNT = 48
GREEDY = SamplingParams(temperature=0.0, max_tokens=TOKEN_COUNT, ignore_eos=True)
WAYS: dict[str, dict[str, object]] = {
    "minicpm3": {"tensor_parallel_size": 1, "executor": "mp", "num_blocks_override": 100},
    "deepseek_v3": {"tensor_parallel_size": 2, "max_num_batched_tokens": 7},
    "axk2": {"tensor_parallel_size": 2, "max_num_batched_tokens": 7},
    "glm_moe_dsa": {"tensor_parallel_size": 1, "executor": "mp", "num_blocks_override": 100},
    "gemma3n": {
        "tensor_parallel_size": 2, "max_num_batched_tokens": 7, "num_blocks_override": 200,
        "speculative_config": '{"method": "ngram", "num_speculative_tokens": 3}',
    },
    "gemma4": {"tensor_parallel_size": 1, "executor": "mp", "num_blocks_override": 150},
    "gemma4_shared": {"tensor_parallel_size": 2, "max_num_batched_tokens": 7},
    "llama4": {
        "tensor_parallel_size": 2, "max_num_batched_tokens": 7, "num_blocks_override": 200,
        "speculative_config": '{"method": "ngram", "num_speculative_tokens": 3}',
    },
    "mimo_v2": {
        "tensor_parallel_size": 2, "max_num_batched_tokens": 7, "num_blocks_override": 200,
        "speculative_config": '{"method": "ngram", "num_speculative_tokens": 3}',
    },
    "laguna": {"tensor_parallel_size": 1, "executor": "mp", "num_blocks_override": 150},
    "longcat": {
        "tensor_parallel_size": 2, "max_num_batched_tokens": 7, "num_blocks_override": 200,
        "speculative_config": '{"method": "ngram", "num_speculative_tokens": 3}',
    },
    "hy_v4": {
        "tensor_parallel_size": 2, "max_num_batched_tokens": 7, "num_blocks_override": 200,
        "speculative_config": '{"method": "ngram", "num_speculative_tokens": 3}',
    },
    "phimoe": {"tensor_parallel_size": 1, "executor": "mp", "num_blocks_override": 100},
}  # fmt: skip


def save(path: Path, case: str) -> list[list[int]]:
    """A checkpoint of the case, and what transformers answers to the prompts."""
    oracle = save_case(path, case)
    words = {f"t{number}": number for number in range(VOCAB_SIZE)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="t0"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(path / "tokenizer.json"))
    expected = []
    for prompt in prompts():
        given = torch.tensor([prompt])
        options = dict(do_sample=False, max_new_tokens=TOKEN_COUNT, pad_token_id=0, attention_mask=torch.ones_like(given))
        expected.append(oracle.generate(given, **options)[0, len(prompt) :].tolist())
    return expected


def prompts() -> list[list[int]]:
    """Of several lengths; two begin alike."""
    generator = torch.Generator().manual_seed(5)
    drawn = [torch.randint(0, VOCAB_SIZE, (length,), generator=generator).tolist() for length in (5, 61, 110, 30)]
    drawn[2][:44] = drawn[1][:44]
    return drawn


@pytest.mark.parametrize("case", WAYS)
def test_answers_are_those_of_transformers_with_hits_and_when_a_rank_is_killed(tmp_path: Path, case: str, stops: Stops) -> None:  # noqa: F811
    """On one rank with few pages, on two in chunks of 7; asked twice, and again while a rank is killed in mid stream."""
    expected, asked = save(tmp_path, case), [{"prompt_token_ids": prompt} for prompt in prompts()]
    settings = {"dtype": "float32", "threads": 1, "log": "off", "max_num_seqs": 4, "block_size": 4} | WAYS[case]
    with LLM(str(tmp_path), **settings) as llm:
        twice = llm.generate(asked * 2, GREEDY, use_tqdm=False)
        core = psutil.Process(llm._engine.engines[0].child.pid)
        stops.ask()
        thread, found = in_background(lambda: llm.generate(asked, GREEDY, use_tqdm=False))
        with stops.stopped(core.pid):
            max(core.children(), key=psutil.Process.create_time).kill()
        thread.join()
    assert [answer.outputs[0].token_ids for answer in (*twice, *found[0])] == expected * 3


def test_a_page_holds_one_row_of_a_token_on_every_rank(tmp_path: Path) -> None:
    save_case(tmp_path, "minicpm3")
    config, dtype = load_config(tmp_path), torch.float32
    assert config.latent is not None and config.latent.width == 40
    half = Parallel(rank=1, world_size=2, all_reduce=lambda tensor: tensor, all_gather=lambda tensor, dim: tensor)
    for parallel in (alone(), half):
        assert kv_bytes_per_page(config, 16, dtype, parallel) == config.layer_count * 16 * 40 * 4
        cache = make_kv_cache(config, 5, 16, dtype, "cpu", parallel, together=True)
        assert page_rows(cache).shape == (5, kv_bytes_per_page(config, 16, dtype, parallel))
        assert all(key.shape == (5, 1, 16, 40) and key.data_ptr() == value.data_ptr() for key, value in cache)
    assert kv_bytes_per_page(config, 16, torch.int8, alone()) == config.layer_count * 16 * 42


def test_a_page_holds_the_index_keys_beside_the_rows(tmp_path: Path) -> None:
    """What a digest, a disk and a hand-over take is a page: whole, with one key of the index for each row."""
    save_case(tmp_path, "deepseek_v32")
    config, dtype = load_config(tmp_path), torch.float32
    for together in (True, False):
        cache = make_kv_cache(config, 5, 16, dtype, "cpu", alone(), together=together)
        pages = page_rows(cache)
        assert pages.shape == (5, kv_bytes_per_page(config, 16, dtype, alone())) == (5, 3 * 16 * (40 + 16) * 4)
        for number, pair in enumerate(cache):
            assert [part.shape for part in pair] == [(5, 1, 16, 40), (5, 1, 16, 16)]
            for part, values in enumerate(pair):
                values[2] = 1 + 2 * number + part
        found = torch.from_numpy(pages.copy()).view(dtype)
        assert found[2].unique(return_counts=True)[1].tolist() == [640, 256] * 3 and not found[[0, 1, 3, 4]].any()
    for wrong, given in (("--kv-cache-dtype int8", (torch.int8, "cpu")), ("--device cuda", (dtype, "cuda"))):
        with pytest.raises(ModelError, match=wrong):
            make_kv_cache(config, 5, 16, *given, alone())
