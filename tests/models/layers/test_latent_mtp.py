"""The layer that drafts of DeepSeek 3 and 3.2: transformers' logits, and no other answers."""

from __future__ import annotations

from pathlib import Path

import pytest
import tokenizers
import torch
from family_cases import VOCAB_SIZE, make_model
from model_helpers import Chunk, Model, load_model, make_batch, with_aux
from msgspec.structs import replace
from mtp_cases import one_row
from safetensors.torch import load_file, save_file
from transformers.modeling_layers import MtpLayer
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3DecoderLayer, DeepseekV3RMSNorm
from transformers.models.deepseek_v32.modeling_deepseek_v32 import DeepseekV32DecoderLayer, DeepseekV32RMSNorm

from vnext import LLM, SamplingParams
from vnext.models.families.latent import deepseek
from vnext.models.layers.head_layer import HeadBatch
from vnext.models.layers.kv_cache import make_kv_cache
from vnext.models.layers.sharding import alone
from vnext.models.loading.unread import unread
from vnext.models.loading.weights import load_params

TOKENS = torch.randint(0, VOCAB_SIZE, (90,), generator=torch.Generator().manual_seed(1))
NAMES = {"mtp_block.": "", "post_norm.": "shared_head.norm."}


LAYERS = {
    "deepseek_v3": (DeepseekV3DecoderLayer, DeepseekV3RMSNorm), "deepseek_v32": (DeepseekV32DecoderLayer, DeepseekV32RMSNorm),
}  # fmt: skip


def save(path: Path, case: str) -> tuple[torch.nn.Module, torch.nn.Module]:
    """The model, and a layer of transformers for it, also as a checkpoint."""
    model = make_model(case)
    model.save_pretrained(path)
    if case == "deepseek_v32":
        model.config.mlp_layer_types = [*model.config.mlp_layer_types, "sparse"]
    torch.manual_seed(4)
    layer = MtpLayer(model.config, *LAYERS[case], 3).eval()
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            parameter.copy_(torch.randn(parameter.shape) * (0.15 if parameter.dim() > 1 else 0.3) + float(parameter.dim() == 1))
            if name.endswith(".bias"):
                parameter.zero_()
    tensors = {}
    for name, tensor in layer.state_dict().items():
        for theirs, ours in NAMES.items():
            name = name.replace(theirs, ours)
        own = f"model.layers.3.{name}"
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            for expert, weight in enumerate(tensor):
                parts = {"gate_proj": weight[:24], "up_proj": weight[24:]} if "gate_up" in name else {"down_proj": weight}
                where = own.rpartition(".")[0]
                tensors |= {f"{where}.{expert}.{part}.weight": each.clone() for part, each in parts.items()}
        else:
            tensors[own] = tensor.clone()
    save_file(load_file(path / "model.safetensors") | tensors, path / "model.safetensors", {"format": "pt"})
    return model, layer


def states_of(model: Model) -> torch.Tensor:
    """The model's states of TOKENS before its last norm, [90, 1, hidden]."""
    batch = with_aux(make_batch([Chunk(TOKENS.tolist(), 0, range(6))], 16), [model.config.layer_count], model.config.hidden_size)
    model.family.forward(model.params, model.kv, batch, model.config, model.parallel)
    assert batch.aux is not None
    return batch.aux.states


@pytest.mark.parametrize("case", LAYERS)
@torch.inference_mode()
def test_its_logits_are_those_of_transformers(tmp_path: Path, case: str) -> None:
    oracle, layer = save(tmp_path, case)
    given, count = TOKENS[None], len(TOKENS) - 1
    hidden, embedded = oracle.model(given).last_hidden_state[:, :-1], oracle.model.embed_tokens(given[:, 1:])
    positions, mask = torch.arange(count)[None], torch.full((count, count), float("-inf")).triu(1)[None, None]
    angles = oracle.model.rotary_emb(hidden, positions)
    expected = oracle.lm_head(layer(embedded, hidden, angles, mask, positions, None))[0]
    model = load_model(tmp_path)
    config = replace(model.config, layer_count=1)
    params = load_params(
        tmp_path, config, alone(), torch.float32, "cpu", assemble=lambda source, _: deepseek.assemble_mtp(source, model.config)
    )
    states = deepseek.combine_mtp(params, states_of(model), config)[:-1]
    kv = make_kv_cache(config, count, 1, torch.float32, "cpu", alone())
    found, after = deepseek.forward_mtp(params, kv, HeadBatch(one_row(TOKENS[1:]), oracle.model.embed_tokens(TOKENS[1:]), states), config)
    logits = model.family.logits(model.params, found, model.config, model.parallel)
    assert (logits - expected).abs().max() <= 1e-4 * expected.abs().max() and torch.equal(found, after)
    assert unread(tmp_path) == ""


@pytest.mark.parametrize("case", LAYERS)
def test_drafts_change_no_answer(tmp_path: Path, case: str) -> None:
    save(tmp_path, case)
    words = {f"t{number}": number for number in range(VOCAB_SIZE)}
    tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="t0")).save(str(tmp_path / "tokenizer.json"))
    asked = [{"prompt_token_ids": TOKENS[:length].tolist()} for length in (5, 80, 23)] * 2
    params, found = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True), []
    for drafted in ({}, {"speculative_config": {"method": "deepseek_mtp", "num_speculative_tokens": 2, "row_cost": 0}}):
        with LLM(str(tmp_path), dtype="float32", threads=1, log="off", block_size=4, executor="inproc", **drafted) as llm:
            found.append([answer.outputs[0].token_ids for answer in llm.generate(asked, params, use_tqdm=False)])
    assert found[0] == found[1]
