"""A whole step in one call gives every token, and every bit of the caches, of forward, logits and sampling one by one."""

from __future__ import annotations

import sys
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from family_cases import CASES, VOCAB_SIZE, save_case
from model_helpers import Chunk, ThreadGroup, formats_of, make_batch, with_aux
from test_fused_decoder import FUSED, LLAMA, TOKENS

from vnext.kernels.arrays import as_tensor
from vnext.models.config.model_config import load_config
from vnext.models.layers import whole_step as module
from vnext.models.layers.kv_cache import kv_groups, make_kv_cache
from vnext.models.layers.sharding import Parallel, alone
from vnext.models.layers.whole_step import WholeStep, whole_step
from vnext.models.loading.weights import load_params
from vnext.models.registry import family
from vnext.runtime.transport.collectives.errors import RankLost
from vnext.sampling.inputs import Allowed, SamplingInputs
from vnext.sampling.sampling import sample

sys.path.append(str(Path(__file__).resolve().parents[1] / "kernels"))  # cpu_levels is shared with the kernels' tests
from cpu_levels import LEVELS, needs_native, using

pytestmark = needs_native

STEPS = (
    [Chunk(TOKENS[:150], 0, range(10)), Chunk(TOKENS[40:57], 0, (20, 21))],
    [Chunk(TOKENS[150:151], 150, range(10)), Chunk(TOKENS[57:60], 17, (20, 21)), Chunk(TOKENS[90:91], 0, (30,))],
    [Chunk(TOKENS[151:152], 151, range(10))],
)
DTYPES = (torch.float32, torch.bfloat16)
FORMS = [(name, dtype, "none") for name in FUSED for dtype in DTYPES]
GROUPED = ("gemma2", "gemma3", "gemma3_short", "qwen2_window", "smollm3_window", "exaone4", "cohere2", "cwm", "vaultgemma", "olmo3", "qwen2_moe", "gpt_oss", "dots1", "gemma4", "gemma4_shared",
           "exaone_moe", "mellum", "afmoe", "gemma4_unified", "granite_swa", "granite_moe_swa", "cohere2_moe", "cohere2_moe_mean", "flint",
           "cohere_compass", "cohere_compass_still")  # fmt: skip
"""Layers of several groups, which run one by one or in a whole step."""
SHARED = ("llama", "qwen2_tied_yarn", "qwen3", "phi3", "smollm3", "gemma2", "gemma3_caps", "granite_hybrid", "exaone4", "glm4",
          "mixtral", "glm4_moe", "deepseek_v2", "minicpm3", "llama_biases", "gpt2_inner", "gpt_neox", "cohere", "arcee", "granite",
          "olmo2", "olmo2_one_key", "hunyuan", "minimax_m2", "qwen2_moe", "gpt_oss", "ministral3", "mistral4", "gemma4",
          "gemma4_shared")  # fmt: skip
"""Models whose outputs ranks can sum."""


def loaded(tmp_path: Path, name: str, dtype: torch.dtype, quantization: str) -> tuple[Any, ...]:
    """(family, parameters, two empty caches, configuration)."""
    save(tmp_path, name)
    return load(tmp_path, dtype, quantization, alone())


def save(folder: Path, name: str) -> None:
    CASES.update(LLAMA)
    try:
        save_case(folder, name)
    finally:
        for each in LLAMA:
            del CASES[each]


def load(folder: Path, dtype: torch.dtype, quantization: str, parallel: Parallel) -> tuple[Any, ...]:
    """As `loaded`, a rank's share of a saved model."""
    config = load_config(folder)
    params = load_params(folder, config, parallel, dtype, "cpu", formats_of(quantization))
    pages = 64 * len(kv_groups(config).windows)
    caches = [make_kv_cache(config, pages, 16, dtype, "cpu", parallel, together=True) for _ in range(2)]
    return family(config.architecture), params, *caches, config


def sampling_of(positions: torch.Tensor) -> SamplingInputs:
    """Of tokens at these places: every fourth greedy, the others by parameters of all kinds."""
    count = len(positions)
    places = torch.arange(count)
    return SamplingInputs(
        temperature=(places % 4) * 0.5,
        top_k=places % 3 * 7,
        top_p=1 - places % 2 * 0.25,
        min_p=(places % 5 == 0) * 0.03,
        seed=places * 977,
        position=positions + 1,
    )


@pytest.mark.parametrize(
    ("name", "dtype", "quantization"),
    [*FORMS, *((name, dtype, "none") for name in GROUPED for dtype in DTYPES), ("llama_biases", torch.bfloat16, "int8"), ("llama", torch.bfloat16, "int8 by bf16")],
)
def test_one_call_is_forward_logits_and_sampling(
    tmp_path: Path, name: str, dtype: torch.dtype, quantization: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Positions are beyond the angles at first; a batch is read again when its tensors have changed."""
    monkeypatch.setattr(module, "POSITIONS_MIN", 3)
    chosen, params, kv, plain_kv, config = loaded(tmp_path, name, dtype, quantization)
    whole = whole_step(params, kv, config, alone())
    assert isinstance(whole, WholeStep) and whole.samples_max == module.LOGITS_MAX // VOCAB_SIZE
    for chunks in STEPS:
        batch = make_batch(chunks, 16, len(kv_groups(config).windows))
        sampling = sampling_of(batch.positions)
        for _ in range(2):
            hidden, _ = chosen.forward(params, plain_kv, batch, config, alone())
            expected = sample(chosen.logits(params, hidden, config, alone()), sampling).tokens
            assert whole.run(batch, sampling).tolist() == expected.tolist()
            assert all(torch.equal(*pair) for ours, theirs in zip(kv, plain_kv) for pair in zip(ours, theirs))
            batch.token_ids.copy_((batch.token_ids + 11) % VOCAB_SIZE)
            sampling.position.add_(1)
    assert kv[-1][0][:10].abs().sum() > 0


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", SHARED)
def test_ranks_sum_in_one_call_as_layer_by_layer(tmp_path: Path, name: str, dtype: torch.dtype) -> None:
    """Two ranks, whose vocabulary is odd; a step may sample nothing."""
    save(tmp_path, name)

    def work(parallel: Parallel) -> list[int]:
        chosen, params, kv, plain_kv, config = load(tmp_path, dtype, "none", parallel)
        whole, found = whole_step(params, kv, config, parallel), []
        assert isinstance(whole, WholeStep)
        for chunks in STEPS:
            batch = make_batch(chunks, 16, len(kv_groups(config).windows))
            batch = batch._replace(sample_at=batch.sample_at[:: len(chunks)].clone() if len(chunks) < 3 else batch.sample_at[:0])
            sampling = sampling_of(batch.positions[batch.sample_at])
            hidden, _ = chosen.forward(params, plain_kv, batch, config, parallel)
            expected = sample(chosen.logits(params, hidden, config, parallel), sampling).tokens
            found += whole.run(batch, sampling).tolist()
            assert found[len(found) - len(expected) :] == expected.tolist()
            assert all(torch.equal(*pair) for ours, theirs in zip(kv, plain_kv) for pair in zip(ours, theirs))
        return found

    ranks = ThreadGroup(2).run(work)
    assert ranks[0] == ranks[1] and len(set(ranks[0])) > 9


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["gpt_oss", "gemma4", "gemma4_shared"])
def test_one_call_is_layer_by_layer_at_every_level(tmp_path: Path, name: str, dtype: torch.dtype, level: Any) -> None:
    chosen, params, kv, plain_kv, config = loaded(tmp_path, name, dtype, "none")
    whole = whole_step(params, kv, config, alone())
    assert whole is not None
    for chunks, threads in zip(STEPS, (3, 1, 3)):
        batch = make_batch(chunks, 16, len(kv_groups(config).windows))
        batch = batch._replace(sample_at=batch.sample_at[1::3].clone())
        with using(level, threads):
            expected, _ = chosen.forward(params, plain_kv, batch, config, alone())
            assert torch.equal(as_tensor(whole.hidden(batch)), expected)


def test_what_ranks_raise_ends_the_step(tmp_path: Path) -> None:
    """With its own exception; the next step is whole again."""
    save(tmp_path, "llama")
    raised = [RankLost("rank 1 has ended"), KeyboardInterrupt()]

    def sum_at(dtype: str, at: int, size_bytes: int) -> None:
        if raised:
            raise raised[0]

    host = SimpleNamespace(sum_at=sum_at, join_at=lambda part, joined, size_bytes, row_bytes: None)
    ranks = Parallel(rank=0, world_size=2, all_reduce=None, all_gather=None, host=host)
    _, params, kv, _, config = load(tmp_path, torch.float32, "none", ranks)
    whole, batch = whole_step(params, kv, config, ranks), make_batch(STEPS[0], 16)
    assert whole is not None
    for expected in (RankLost, KeyboardInterrupt):
        with pytest.raises(expected) as found:
            whole.run(batch, sampling_of(batch.positions))
        assert found.value is raised.pop(0)
    assert len(whole.run(batch, sampling_of(batch.positions))) == len(batch.sample_at)


@pytest.mark.parametrize(("name", "dtype", "quantization"), FORMS)
def test_the_inputs_of_layers_are_those_of_layer_by_layer(tmp_path: Path, name: str, dtype: torch.dtype, quantization: str) -> None:
    """In the whole step, in the layers as one call and one by one; also when a batch comes again with other tokens."""
    chosen, params, kv, plain_kv, config = loaded(tmp_path, name, dtype, quantization)
    whole = whole_step(params, kv, config, alone())
    assert whole is not None
    for chunks, layers in product(STEPS, ([1, 0], [config.layer_count, 0])):
        plain = make_batch(chunks, 16)
        plain = plain._replace(sample_at=plain.sample_at[::2])
        batches = [with_aux(plain, layers, config.hidden_size, dtype) for _ in range(3)]
        sampling = sampling_of(plain.positions[plain.sample_at])
        for _ in range(2):
            assert whole.run(batches[0], sampling).tolist() == whole.run(plain, sampling).tolist()
            chosen.forward(params, plain_kv, batches[1], config, alone())
            chosen.forward(params._replace(stack=None), plain_kv, batches[2], config, alone())
            states = [batch.aux.states.clone() for batch in batches]
            assert not states[2].isnan().any() and not torch.equal(states[2][:, 0], states[2][:, 1])
            assert torch.equal(states[0], states[1]) and torch.equal(states[1], states[2])
            plain.token_ids.copy_((plain.token_ids + 11) % VOCAB_SIZE)
            sampling.position.add_(1)


@pytest.mark.parametrize(
    ("name", "dtype", "quantization"),
    [*FORMS[:4], *((name, torch.bfloat16, "none") for name in ("gemma2", "gemma4", "gemma4_shared"))],
)
def test_states_and_their_logits_are_those_of_the_long_way(tmp_path: Path, name: str, dtype: torch.dtype, quantization: str) -> None:
    """A step that goes as far as the normed states, in turns with one that samples; logits of some of them, in any number."""
    chosen, params, kv, plain_kv, config = loaded(tmp_path, name, dtype, quantization)
    whole = whole_step(params, kv, config, alone())
    assert whole is not None
    for chunks in STEPS:
        batch = make_batch(chunks, 16, len(kv_groups(config).windows))
        batch = batch._replace(sample_at=batch.sample_at[1::2].clone())
        for _ in range(2):
            hidden, _ = chosen.forward(params, plain_kv, batch, config, alone())
            logits = chosen.logits(params, hidden, config, alone())
            states = whole.hidden(batch)
            assert torch.equal(as_tensor(states), hidden) and all(
                torch.equal(*pair) for ours, theirs in zip(kv, plain_kv) for pair in zip(ours, theirs)
            )
            for some in (slice(None), slice(1, 2), slice(0, 0)):
                assert torch.equal(as_tensor(np.ascontiguousarray(whole.logits(states[some]))), logits[some])
            sampling = sampling_of(batch.positions[batch.sample_at])
            assert whole.run(batch, sampling).tolist() == sample(logits, sampling).tokens.tolist()
            batch.token_ids.copy_((batch.token_ids + 11) % VOCAB_SIZE)


def test_states_and_logits_of_two_ranks(tmp_path: Path) -> None:
    save(tmp_path, "llama")

    def work(parallel: Parallel) -> None:
        chosen, params, kv, plain_kv, config = load(tmp_path, torch.bfloat16, "none", parallel)
        whole, batch = whole_step(params, kv, config, parallel), make_batch(STEPS[0], 16)
        assert whole is not None
        hidden, _ = chosen.forward(params, plain_kv, batch, config, parallel)
        expected, states = chosen.logits(params, hidden, config, parallel), whole.hidden(batch)
        assert torch.equal(as_tensor(states), hidden)
        assert torch.equal(as_tensor(np.ascontiguousarray(whole.logits(states[3:90]))), expected[3:90])

    ThreadGroup(2).run(work)


def test_masks_are_waited_for_after_the_forward(tmp_path: Path) -> None:
    """They are written between the forward and the sampling, and some rows have none."""
    chosen, params, kv, plain_kv, config = loaded(tmp_path, "llama_biases", torch.float32, "none")
    whole = whole_step(params, kv, config, alone())
    assert whole is not None
    batch = make_batch([Chunk(TOKENS[:20], 0, (0, 1)), Chunk(TOKENS[40:57], 0, (2, 3)), Chunk(TOKENS[7:9], 0, (4,))], 16)
    count = len(batch.sample_at)
    masks = torch.zeros((4, (VOCAB_SIZE + 31) // 32), dtype=torch.int32)

    def make() -> None:
        masks[:] = torch.randint(-(2**31), 2**31, masks.shape, generator=torch.Generator().manual_seed(8)).to(torch.int32)

    bound = Allowed(torch.tensor([2, 0]), torch.tensor([1, 3]), masks, make)
    sampling = sampling_of(batch.positions[batch.sample_at])._replace(allowed=bound)
    tokens = whole.run(batch, sampling).tolist()
    hidden, _ = chosen.forward(params, plain_kv, batch, config, alone())
    logits = chosen.logits(params, hidden, config, alone())
    assert tokens == sample(logits, sampling).tokens.tolist() and len(tokens) == count
    assert tokens != sample(logits, sampling._replace(allowed=None)).tokens.tolist()
    for row, place in ((2, 1), (0, 3)):
        assert int(masks[place, tokens[row] // 32]) >> tokens[row] % 32 & 1


def test_what_it_does_not_serve_goes_the_long_way(tmp_path: Path) -> None:
    _, params, kv, _, config = loaded(tmp_path, "llama", torch.float32, "none")
    ranks = Parallel(rank=0, world_size=2, all_reduce=None, all_gather=None)
    other = make_kv_cache(config, 4, 16, torch.bfloat16, "cpu", alone())
    assert whole_step(params, kv, config, alone()) is not None
    for case in (
        (params._replace(stack=None), kv, config, alone()),
        (params, other, config, alone()),
        (params, kv, config, ranks),
    ):
        assert whole_step(*case) is None
    sharing = Parallel(rank=0, world_size=2, all_reduce=None, all_gather=None, host=SimpleNamespace(sum_at=print, join_at=print))
    for name, slots, is_served in (("llama", None, True), ("llama", SimpleNamespace(), False)):
        save(tmp_path, name)
        _, params, kv, _, config = load(tmp_path, torch.float32, "none", sharing)
        assert (whole_step(params, kv, config, sharing, slots) is not None) is is_served, name
