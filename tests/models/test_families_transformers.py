"""Every family gives transformers' logits and greedy tokens, on one rank and on two, and stays as near in bfloat16."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from device_twin import TwinDevice
from device_watch import Watch
from family_cases import CASES, VOCAB_SIZE, make_model, save_case
from model_helpers import Chunk, Model, ThreadGroup, load_model, make_batch, with_aux

from vnext.kernels.table import operations, plain_operations, substituted
from vnext.models.config.model_config import load_config, parse_config
from vnext.models.errors import ModelError
from vnext.models.layers.kv_cache import kv_groups
from vnext.models.layers.sharding import Parallel, alone
from vnext.runtime.gpu.piecewise_graphs import PiecewiseGraphs
from vnext.runtime.protocol.settings import ModelSettings
from vnext.runtime.rank.runner import ModelRunner

PROMPT = [int(token) for token in torch.randint(0, VOCAB_SIZE, (300,), generator=torch.Generator().manual_seed(1))]
BLOCKS = [9, 2, 30, 4, 11, 8, *range(40, 57), 0, 1]
TOKEN_COUNT = 64
ERROR_MAX = 1e-4
DTYPES = (torch.bfloat16, torch.float32)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("families")


def answer(path: Path, parallel: Parallel | None = None) -> tuple[torch.Tensor, list[int]]:
    """(logits of the prompt [300, V], greedy tokens), the prompt in two chunks. The folder has the case's name."""
    model = load_model(path, parallel=parallel, asked_length=CASES[path.name].asked_length)
    first = model.logits(Chunk(PROMPT[:83], 0, BLOCKS))
    logits = torch.cat((first, model.logits(Chunk(PROMPT[83:], 83, BLOCKS))))
    tokens = [int(logits[-1].argmax())]
    while len(tokens) < TOKEN_COUNT:
        step = model.logits(Chunk(tokens[-1:], len(PROMPT) + len(tokens) - 1, BLOCKS))
        tokens.append(int(step[-1].argmax()))
    return logits, tokens


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest difference, as a share of the largest value."""
    return float((found - expected).abs().max() / expected.abs().max())


@pytest.mark.parametrize("name", CASES)
@torch.inference_mode()
def test_the_inputs_of_layers(tmp_path: Path, name: str) -> None:
    """What draft heads read are transformers' hidden states: before each layer, and behind the last one."""
    oracle = save_case(tmp_path / name, name)
    body = oracle.get_decoder()
    expected = body(torch.tensor([PROMPT]), output_hidden_states=True)
    model = load_model(tmp_path / name, asked_length=CASES[name].asked_length)
    count = model.config.layer_count
    batch = make_batch([Chunk(PROMPT, 0, range(19))], 16, len(kv_groups(model.config).windows))
    batch = with_aux(batch, range(count + 1), model.config.hidden_size)
    model.family.forward(model.params, model.kv, batch, model.config, model.parallel)
    assert batch.aux is not None and count > 1
    each = count // (len(expected.hidden_states) - 1)  # LongCat's authors count two of our layers as one
    for layer in range(0, count, each):
        inputs = expected.hidden_states[layer // each][0]
        first = inputs[:, 0] if len(inputs) == len(PROMPT) and inputs.dim() == 3 else inputs  # of several streams
        assert relative_error(batch.aux.states[:, layer], first) < ERROR_MAX
    (norm,) = (part for part_name, part in body.named_children() if part_name in ("norm", "ln_f", "final_layer_norm"))
    assert relative_error(norm(batch.aux.states[:, count]), expected.last_hidden_state[0]) < ERROR_MAX


@pytest.mark.parametrize("name", CASES)
@torch.inference_mode()
def test_logits_and_greedy_tokens(saved: Path, name: str) -> None:
    oracle = save_case(saved / name, name)
    prompt = torch.tensor([PROMPT])
    expected = oracle(prompt).logits[0]
    greedy = oracle.generate(
        prompt, attention_mask=torch.ones_like(prompt), do_sample=False, max_new_tokens=TOKEN_COUNT, pad_token_id=0
    )
    expected_tokens = greedy[0, len(PROMPT) :].tolist()
    assert len(set(expected.argmax(-1).tolist())) > 3, "a model that always says the same would prove little"
    single = answer(saved / name)
    ranks = ThreadGroup(2).run(torch.inference_mode()(lambda parallel: answer(saved / name, parallel)))
    for logits, tokens in (single, *ranks):
        assert relative_error(logits, expected) <= ERROR_MAX
        assert torch.equal(logits.argmax(-1), expected.argmax(-1)) and tokens == expected_tokens
    assert torch.equal(ranks[0][0], ranks[1][0]) and torch.equal(ranks[0][0], single[0])


def logits_by_its_experts(model: Model, truth: Model) -> torch.Tensor:
    """The prompt's logits [T, V] by `model`, whose tokens keep the truth's experts. Rounding decides near ties, and where all
    tokens attend to one that went elsewhere, all logits move with it: OLMoE's do in AVX2's order of sums, by one token of 300."""
    usual, kept = operations("cpu").route, []

    def keep(*arguments: Any) -> Any:
        kept.append(usual(*arguments))
        return kept[-1]

    def again(*arguments: Any) -> Any:
        (shares, ids), (true_shares, true_ids) = usual(*arguments), kept.pop(0)
        is_same = (ids.sort(1).values == true_ids.sort(1).values).all(1, keepdim=True)
        assert is_same.float().mean() > 0.9, "these are not near ties"
        return torch.where(is_same, shares, true_shares), torch.where(is_same, ids, true_ids)

    for each, route in ((truth, keep), (model, again)):
        whole = each._replace(params=each.params._replace(stack=None))  # in one call nobody chooses
        with substituted(operations("cpu")._replace(route=route)):
            logits = whole.logits(Chunk(PROMPT, 0, BLOCKS))
    assert not kept
    return logits


@pytest.mark.parametrize("name", CASES)
@torch.inference_mode()
def test_bfloat16_is_as_near_to_the_truth_as_transformers(saved: Path, name: str) -> None:
    """The truth is the float32 result of the bfloat16 weights. Both sides round after about every operation, at places
    that differ, so neither is right and their errors are of one size. Ours rounds less often but for one place: a bias
    is added to a product already rounded, where a fused addition rounds once. That doubles the variance of such an
    operation's rounding, and of the whole at most: hence the factor of the square root of 2. Two errors lie within
    their sum of each other. The median over tokens, for a near tie of experts may send single tokens elsewhere."""
    oracle = make_model(name)
    for parameter in oracle.parameters():
        parameter.copy_(parameter.bfloat16())
    (CASES[name].save or type(oracle).save_pretrained)(oracle, saved / f"{name}-16")
    prompt = torch.tensor([PROMPT])
    truth = oracle(prompt).logits[0]
    oracle.save_pretrained(saved / f"{name}-theirs")
    theirs = type(oracle).from_pretrained(saved / f"{name}-theirs", dtype=torch.bfloat16).eval()(prompt).logits[0].float()
    both = [load_model(saved / f"{name}-16", asked_length=CASES[name].asked_length, dtype=each) for each in DTYPES]
    has_experts = both[0].config.experts is not None
    ours = logits_by_its_experts(*both) if has_experts else both[0].logits(Chunk(PROMPT, 0, BLOCKS))

    def error(one: torch.Tensor, other: torch.Tensor) -> float:
        return float(((one - other).square().mean(1).sqrt() / truth.square().mean(1).sqrt()).median())

    assert 0.0 < error(ours, truth) <= 2**0.5 * error(theirs, truth) < 0.05
    assert error(ours, theirs) <= error(ours, truth) + error(theirs, truth)


ONE_OF_TWO = Parallel(
    rank=1, world_size=2, all_reduce=lambda tensor: tensor + tensor, all_gather=lambda tensor, dim: torch.cat((tensor, tensor), dim)
)
"""A rank whose other gives what it gives: collectives without any work of the host."""


@pytest.mark.parametrize("name", CASES)
@torch.inference_mode()
def test_a_forward_can_be_captured_and_makes_no_host_wait(
    saved: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """On one rank and on two. Attention and the products of experts aside, which are kernels' business."""
    plain = plain_operations()._replace(experts=lambda x, *others: torch.zeros_like(x))
    monkeypatch.setattr("vnext.models.loading.tensor_place.operations", lambda device_type: plain)
    monkeypatch.setattr("vnext.runtime.rank.runner.serves", lambda *_: False)
    monkeypatch.setattr("vnext.models.layers.layers.operations", lambda device_type: plain)
    if not (saved / name).exists():
        save_case(saved / name, name)
    config = load_config(saved / name, False, CASES[name].asked_length)
    for parallel in (alone(), ONE_OF_TWO):
        device, runner = TwinDevice(), ModelRunner(saved / name, ModelSettings(dtype="float32"), "cpu", parallel, config=config)
        model, watch = runner.device_model(4, 16), Watch(device)
        pieces = PiecewiseGraphs(device, model, 4, plain.paged_attention)
        static = pieces._static(8, adapted=False)

        step = partial(pieces._body, static, lambda query, *others: torch.zeros_like(query))
        with watch.watching():
            model.logits(step())
            graph = device.graph()
            graph.begin()
            model.logits(step())
            graph.end()
        assert watch.looks > 100


FULL_CONFIGS = {case.architecture: case.config for case in CASES.values()} | {
    "LlamaForCausalLM": "LlamaConfig",
    "Gemma3ForConditionalGeneration": "Gemma3Config",
    "Gemma3nForConditionalGeneration": "Gemma3nConfig",
    "CohereCompassForConditionalGeneration": "CohereCompassConfig",
    "Llama4ForConditionalGeneration": "Llama4Config",
    "Gemma4ForConditionalGeneration": "Gemma4Config",
    "Gemma4UnifiedForConditionalGeneration": "Gemma4UnifiedConfig",
}
NEEDED: dict[str, dict[str, Any]] = {
    "Glm4MoeForCausalLM": {"head_dim": 128},
    "DeepseekV2ForCausalLM": {"num_experts_per_tok": 6},
    "Dots1ForCausalLM": {"n_routed_experts": 128, "n_shared_experts": 2, "num_experts_per_tok": 6},
    "Gemma3ForConditionalGeneration": {"vision_config": {"image_size": 896, "patch_size": 14}},
    "GraniteMoeHybridForCausalLM": {"num_local_experts": 0, "layer_types": ["full_attention"] * 32},
}
"""What a configuration must say that transformers assumes otherwise."""
SIZES = {"vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"}
SIZES |= {"n_embd", "n_layer", "n_head"}
TOLD = {"architectures", "eos_token_id", "bos_token_id", "dtype"}


@pytest.mark.parametrize("architecture", FULL_CONFIGS)
def test_what_a_config_leaves_out_is_what_transformers_assumes(architecture: str) -> None:
    """Each key in its turn; the sizes of a model must be there, or be what transformers assumes."""
    needed = NEEDED.get(architecture, {})
    whole: dict[str, Any] = json.loads(json.dumps(getattr(transformers, FULL_CONFIGS[architecture])(**needed).to_dict()))
    whole["architectures"] = [architecture]
    expected, inner = parse_config(whole, {}), whole.get("text_config", whole)
    assert len(inner) > 30
    for left_out in inner.keys() - TOLD - needed.keys():
        fewer = {key: value for key, value in inner.items() if key != left_out}
        try:
            found = parse_config({**whole, "text_config": fewer} if "text_config" in whole else fewer, {})
        except ModelError as error:
            assert left_out in SIZES and f"config.json has no {left_out!r}" in str(error)
        else:
            assert found == expected, left_out
