"""The decoder's layers in one call give every bit, in hidden states and caches, of the layers one by one."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from family_cases import CASES, VOCAB_SIZE, Case, save_case
from model_helpers import Chunk, Model, ThreadGroup, load_model, make_batch

from vnext.kernels.table import operations, plain_operations, substituted
from vnext.models.layers import fused
from vnext.models.layers.kv_cache import kv_groups, make_kv_cache
from vnext.models.layers.layers import layer_steps
from vnext.models.loading.weights import load_params

sys.path.append(str(Path(__file__).resolve().parents[1] / "kernels"))  # cpu_levels is shared with the kernels' tests
from cpu_levels import LEVELS, needs_native, using

pytestmark = needs_native

LLAMA = {
    "llama": Case("LlamaForCausalLM", "LlamaConfig", {}),
    "llama_biases": Case("LlamaForCausalLM", "LlamaConfig", {"attention_bias": True, "tie_word_embeddings": True}),
}
FUSED = (
    "llama", "llama_biases", "mistral", "qwen2", "qwen2_tied_yarn", "qwen3", "qwen3_bias_yarn", "phi3", "phi3_longrope",
    "smollm3", "granite_hybrid", "exaone4_whole", "glm", "glm4",
    "mixtral", "qwen3_moe_mixed", "glm4_moe", "ling", "ling_2", "solar_open", "ernie_moe",
    "minicpm3", "deepseek_v2", "deepseek_v3", "youtu", "axk1",
    "gpt2_inner", "gpt_neox", "gpt_neox_serial", "stablelm", "stablelm_parallel", "starcoder2", "cohere", "nemotron", "jais2", "arcee", "apertus",
    "granite", "olmo2", "olmo2_one_key", "hunyuan", "minimax_m2", "hunyuan_moe", "hyperclovax", "hyperclovax_plain", "hy_v3",
    "ministral3", "mistral4", "gemma", "helium", "seed_oss", "ernie", "olmoe", "flex_olmo",
)  # fmt: skip
ONE_BY_ONE = ("gemma3n",)
TOKENS = torch.randint(0, VOCAB_SIZE, (200,), generator=torch.Generator().manual_seed(8)).tolist()
STEPS = (
    [Chunk(TOKENS[:150], 0, range(10)), Chunk(TOKENS[40:57], 0, (20, 21))],
    [Chunk(TOKENS[150:151], 150, range(10)), Chunk(TOKENS[57:60], 17, (20, 21)), Chunk(TOKENS[90:91], 0, (30,))],
    [Chunk(TOKENS[151:152], 151, range(10))],
)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The checkpoint of a case, made when it is first asked for."""
    made: dict[str, Path] = {}
    CASES.update(LLAMA)

    def folder(name: str) -> Path:
        if name not in made:
            made[name] = tmp_path_factory.mktemp(name)
            save_case(made[name], name)
        return made[name]

    yield folder
    for name in LLAMA:
        del CASES[name]


def load(path: Path, dtype: torch.dtype) -> Model:
    model = load_model(path)
    params = load_params(path, model.config, model.parallel, dtype, "cpu")
    return model._replace(params=params, kv=make_kv_cache(model.config, 64, 16, dtype, "cpu", model.parallel))


def hidden_states(model: Model, sample_at: list[torch.Tensor]) -> list[torch.Tensor]:
    """What each step of STEPS gives where it is sampled."""
    found = []
    for chunks, places in zip(STEPS, sample_at):
        batch = make_batch(chunks, 16, len(kv_groups(model.config).windows))._replace(sample_at=places)
        found.append(model.family.forward(model.params, model.kv, batch, model.config, model.parallel)[0])
    return found


def one_by_one(model: Model) -> Model:
    """The same weights without the one call, and a cache of its own."""
    kv = tuple((key.clone(), value.clone()) for key, value in model.kv)
    return model._replace(params=model.params._replace(stack=None), kv=kv)


EVERY = [torch.arange(sum(len(chunk.tokens) for chunk in chunks)) for chunks in STEPS]
SOME = [torch.tensor([*range(60, 130), 149, 3, 149, 150, 166]), torch.tensor([4]), torch.tensor([0])]
NONE = [torch.empty(0, dtype=torch.int64)] * len(STEPS)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("name", FUSED)
def test_one_call_is_the_calls(folders: Any, name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    model = load(folders(name), dtype)
    assert model.params.stack is not None
    served = []
    monkeypatch.setattr(fused.kernel, "run", lambda *a, run=fused.kernel.run: served.append(True) or run(*a))
    for sample_at in (EVERY, SOME, NONE):
        plain = one_by_one(model)
        found, expected = hidden_states(model, sample_at), hidden_states(plain, sample_at)
        assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))
        assert all(torch.equal(*pair) for ours, theirs in zip(model.kv, plain.kv) for pair in zip(ours, theirs))
        assert model.kv[-1][0][:10].abs().sum() > 0
    assert len(served) == 3 * len(STEPS)


@pytest.mark.parametrize("form", ["one call", "layer by layer", "references"])
@pytest.mark.parametrize("name", ["llama", "qwen2_window"])
def test_pages_that_lie_together_change_no_bit(folders: Any, name: str, form: str) -> None:
    """Nor does it where groups of layers share them."""
    with substituted(plain_operations() if form == "references" else operations("cpu")):
        model = load(folders(name), torch.float32)
        if form == "layer by layer":
            model = one_by_one(model)
        pages = 64 * len(kv_groups(model.config).windows)
        kv = [make_kv_cache(model.config, pages, 16, torch.float32, "cpu", model.parallel, at_once) for at_once in (False, True)]
        (expected, apart), (found, together) = ((hidden_states(model._replace(kv=each), SOME), each) for each in kv)
    assert not together[0][0].is_contiguous() and (model.params.stack is not None) is (form == "one call")
    assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))
    assert all(torch.equal(*pair) for ours, theirs in zip(together, apart) for pair in zip(ours, theirs))


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_one_call_is_the_calls_at_every_level(folders: Any, dtype: torch.dtype, level: Any) -> None:
    model = load(folders("qwen3_bias_yarn"), dtype)
    for threads in (1, 3):
        with using(level, threads):
            found, expected = hidden_states(model, SOME), hidden_states(one_by_one(model), SOME)
        assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))


@pytest.mark.parametrize("name", ONE_BY_ONE)
def test_streams_run_one_by_one(folders: Any, name: str) -> None:
    assert load_model(folders(name)).params.stack is None


def test_plain_weights_run_one_by_one(folders: Any, plain_weights: None) -> None:
    assert load_model(folders("llama")).params.stack is None


def test_ranks_run_one_by_one_for_their_sums_meet_between(folders: Any) -> None:
    whole = load_model(folders("llama")).logits(*STEPS[0])

    def logits(parallel: Any) -> torch.Tensor:
        return load_model(folders("llama"), parallel=parallel).logits(*STEPS[0])

    group = ThreadGroup(2)
    for found in group.run(logits):
        torch.testing.assert_close(found, whole, rtol=1e-4, atol=1e-4)


def test_a_cache_of_another_dtype_is_left_to_the_layers(folders: Any) -> None:
    """The one call does not take it; the layers refuse it, as they did."""
    model = load(folders("llama"), torch.bfloat16)
    other = make_kv_cache(model.config, 64, 16, torch.float32, "cpu", model.parallel)
    batch = make_batch(STEPS[0], 16)
    step = torch.zeros(len(batch.token_ids), model.config.hidden_size, dtype=torch.bfloat16)
    steps = layer_steps(other, batch, model.config, model.parallel, model.params.frequencies)
    assert fused.run(model.params.stack, step, model.params.norm, other, batch, steps[0]) is None
