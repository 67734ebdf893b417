"""The layers that draft of hybrids: transformers' logits, and no other answers, however states are kept, copied and given back."""

from __future__ import annotations

import json
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
from engine_here import engines_here
from family_cases import VOCAB_SIZE
from hybrids import Hybrid, load_hybrid, save_hybrid
from model_helpers import Chunk, make_batch, with_aux
from msgspec.structs import replace
from mtp_cases import one_row
from safetensors.torch import load_file, save_file
from test_hybrid_engine import talks
from transformers.modeling_layers import MtpLayer
from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHBlock, NemotronHRMSNorm
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5DecoderLayer, Qwen3_5RMSNorm
from transformers.models.qwen3_5_moe.modeling_qwen3_5_moe import Qwen3_5MoeDecoderLayer, Qwen3_5MoeRMSNorm
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextDecoderLayer, Qwen3NextRMSNorm

sys.path += [str(Path(__file__).resolve().parents[2] / "e2e")]
from draft_heads import PlainLayer, Seen

from vnext import LLM, SamplingParams
from vnext.models.families.hybrids import nemotron_h, qwen3_5
from vnext.models.layers.batch import RecurrentBatch
from vnext.models.layers.head_layer import HeadBatch
from vnext.models.layers.kv_cache import make_kv_cache
from vnext.models.layers.sharding import alone
from vnext.models.loading.unread import unread
from vnext.models.loading.weights import load_params

TOKENS = torch.randint(0, VOCAB_SIZE, (90,), generator=torch.Generator().manual_seed(1))
NAMES = {
    "mtp_block.": "layers.0.", "post_norm.": "norm.", "enorm.": "pre_fc_norm_embedding.", "hnorm.": "pre_fc_norm_hidden.",
    "eh_proj.": "fc.",
}  # fmt: skip
LAYERS = {
    "qwen3_5_images": (Qwen3_5DecoderLayer, Qwen3_5RMSNorm), "qwen3_5_moe": (Qwen3_5MoeDecoderLayer, Qwen3_5MoeRMSNorm),
    "qwen3_next": (Qwen3NextDecoderLayer, Qwen3NextRMSNorm),
}  # fmt: skip
ATTENDING = 3
"""A layer of each of these that attends."""
PAIRS = {"nemotron_h_moe": (2, 1), "nemotron_h_narrow": (3, 1)}
"""Cases with a layer that attends and one with experts, one behind the other."""


class Pair(torch.nn.Module):
    """Nemotron's layers that draft, as its authors have them."""

    def __init__(self, config: Any, layers: tuple[int, int]) -> None:
        super().__init__()
        size, eps = config.hidden_size, config.layer_norm_epsilon
        self.enorm, self.hnorm, self.post_norm = (NemotronHRMSNorm(size, eps=eps) for _ in range(3))
        self.eh_proj = torch.nn.Linear(2 * size, size, bias=False)
        self.layers = torch.nn.ModuleList(NemotronHBlock(config, layer) for layer in layers)

    def forward(self, embedded: torch.Tensor, hidden: torch.Tensor, angles: None, mask: torch.Tensor, *_: object) -> torch.Tensor:
        hidden = self.eh_proj(torch.cat((self.enorm(embedded), self.hnorm(hidden)), dim=-1))
        for layer in self.layers:
            hidden = layer(hidden, attention_mask=mask)
        return self.post_norm(hidden)


OF_PAIRS = {
    "enorm.": "layers.0.enorm.", "hnorm.": "layers.0.hnorm.", "eh_proj.": "layers.0.eh_proj.", "post_norm.": "layers.1.final_layernorm.",
}  # fmt: skip


def save(path: Path) -> tuple[torch.nn.Module, torch.nn.Module]:
    """The model of the case that the folder is named after, and a layer of transformers for it, also as a checkpoint. A token follows
    mostly from the one before it, as the layer knows, too: other layers add little."""
    model = save_hybrid(path, path.name)
    config = model.config.get_text_config()
    torch.manual_seed(4)
    is_pair = path.name in PAIRS
    layer = (Pair(config, PAIRS[path.name]) if is_pair else MtpLayer(config, *LAYERS[path.name], ATTENDING)).eval()
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(torch.randn(parameter.shape) * (0.15 if parameter.dim() > 1 else 0.1) + float(is_pair and parameter.dim() == 1))
        layer.eh_proj.weight[:, : config.hidden_size] += torch.eye(config.hidden_size)
        for name, parameter in (*model.named_parameters(), *layer.named_parameters()):
            if name.endswith(("o_proj.weight", "out_proj.weight", "down_proj.weight", "experts.down_proj")):
                parameter.mul_(0.2)
        embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
        embedding.copy_(torch.randn(embedding.shape))
        head.copy_(embedding[torch.randperm(len(embedding))] * 0.5)
    model.save_pretrained(path)
    tensors = load_file(path / "model.safetensors") | {name: each.clone() for name, each in stored(layer, OF_PAIRS if is_pair else NAMES).items()}
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    settings = json.loads((path / "config.json").read_text())
    settings.get("text_config", settings)["num_nextn_predict_layers" if is_pair else "mtp_num_hidden_layers"] = 1
    (path / "config.json").write_text(json.dumps(settings))
    return model, layer


def stored(layer: torch.nn.Module, names: dict[str, str]) -> dict[str, torch.Tensor]:
    """Its tensors as checkpoints name them: each expert for itself."""
    found = {}
    for name, tensor in layer.state_dict().items():
        for theirs, ours in names.items():
            name = name.replace(theirs, ours)
        if name.endswith(("experts.gate_up_proj", "experts.up_proj", "experts.down_proj")):
            where, _, part = name.rpartition(".")
            for expert, weight in enumerate(tensor):
                parts = zip(("gate_proj", "up_proj"), weight.chunk(2)) if part == "gate_up_proj" else [(part, weight)]
                found |= {f"mtp.{where}.{expert}.{part}.weight": each for part, each in parts}
        else:
            found["mtp." + name] = tensor
    return found


@pytest.fixture(scope="module", params=[*LAYERS, *PAIRS])
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, torch.nn.Module, torch.nn.Module]:
    path = tmp_path_factory.mktemp("hybrid") / request.param
    return path, *save(path)


def states_of(hybrid: Hybrid) -> torch.Tensor:
    """The model's states of TOKENS before its last norm, [90, 1, hidden]."""
    model = hybrid.model
    batch = with_aux(make_batch([Chunk(TOKENS.tolist(), 0, range(6))], 16), [model.config.layer_count], model.config.hidden_size)
    pages = RecurrentBatch(hybrid.pools, torch.zeros(1, dtype=torch.int32), torch.ones(1, dtype=torch.bool))
    model.family.forward(model.params, model.kv, batch._replace(recurrent=pages), model.config, model.parallel)
    assert batch.aux is not None
    return batch.aux.states


class PlainHybrid(PlainLayer):
    """The layer that drafts, and the model whose states it reads, in transformers."""

    def __init__(self, oracle: torch.nn.Module, layer: torch.nn.Module) -> None:
        self.oracle, self.layer_, self.known = oracle, layer, torch.arange(VOCAB_SIZE)
        self.rotary = getattr(getattr(oracle.model, "language_model", oracle.model), "rotary_emb", lambda *_: None)

    def states(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.oracle.model(tokens[None]).last_hidden_state[0]

    def step(self, tokens: torch.Tensor, states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        state = self.after(tokens, states)[-1]
        return self.oracle.lm_head(state), state

    def after(self, tokens: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        """The layer's states of the tokens int64 [n], by the states before them, [n, hidden]."""
        hidden, count = states[None], len(tokens)
        embedded, positions = self.oracle.get_input_embeddings()(tokens[None]), torch.arange(count)[None]
        mask = torch.full((count, count), float("-inf")).triu(1)[None, None]
        found: torch.Tensor = self.layer_(embedded, hidden, self.rotary(hidden, positions), mask, positions, None)[0]
        return found


@torch.inference_mode()
def test_its_logits_are_those_of_transformers(saved: tuple[Path, torch.nn.Module, torch.nn.Module]) -> None:
    path, oracle, layer = saved
    count, embed = len(TOKENS) - 1, oracle.get_input_embeddings()
    plain = PlainHybrid(oracle, layer)
    expected = oracle.lm_head(plain.after(TOKENS[1:], plain.states(TOKENS)[:-1]))
    hybrid = load_hybrid(path)
    model, own = hybrid.model, nemotron_h if path.name in PAIRS else qwen3_5
    config = replace(model.config, layer_count=1, recurrent=None)
    params = load_params(
        path, config, alone(), torch.float32, "cpu", assemble=lambda source, _: own.assemble_mtp(source, model.config)
    )
    states = own.combine_mtp(params, states_of(hybrid), config)[:-1]
    kv = make_kv_cache(config, count, 1, torch.float32, "cpu", alone())
    found, after = own.forward_mtp(params, kv, HeadBatch(one_row(TOKENS[1:]), embed(TOKENS[1:]), states), config)
    logits = model.family.logits(model.params, found, model.config, model.parallel)
    assert (logits - expected).abs().max() <= 1e-4 * expected.abs().max() and torch.equal(found, after)
    assert unread(path) == ""


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"preempted": range(3, 300, 2), "max_num_batched_tokens": 7},
        {"state_pages": 13, "snapshot_interval": 8},
        {"prefix_caching": False},
    ],
    ids=str,
)
def test_tokens_do_not_depend_on_its_drafts(
    saved: tuple[Path, torch.nn.Module, torch.nn.Module], changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And drafts follow from the tokens alone."""
    path, *made = saved
    seen = Seen(monkeypatch)
    found = talks(path, "mtp", head="", **changes)
    assert found.answers == talks(path).answers
    assert found.drafted > found.kept > found.drafted // 4
    seen.all = seen.all[:: len(seen.all) // 61]
    seen.require(PlainHybrid(*made))


@pytest.mark.parametrize("ranks", [1, 2])
def test_an_engine_drafts_with_it(saved: tuple[Path, torch.nn.Module, torch.nn.Module], ranks: int) -> None:
    path, *_ = saved
    words = {f"t{number}": number for number in range(VOCAB_SIZE)}
    tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="t0")).save(str(path / "tokenizer.json"))
    asked = [{"prompt_token_ids": TOKENS[:length].tolist()} for length in (5, 80, 23)] * 2
    params, found = SamplingParams(temperature=0.7, seed=5, max_tokens=24, ignore_eos=True), []
    usual: dict[str, Any] = dict(dtype="float32", threads=1, log="off", block_size=4, check_laws=True)
    for own in ({}, {"speculative_config": {"method": "mtp", "num_speculative_tokens": 2, "row_cost": 0}, "tensor_parallel_size": ranks}):
        alone_ = {"executor": "inproc"} if own.get("tensor_parallel_size", 1) == 1 else {}
        with engines_here() if alone_ else nullcontext(), LLM(str(path), **usual, **own, **alone_) as llm:
            found.append([answer.outputs[0].token_ids for answer in llm.generate(asked, params, use_tqdm=False)])
    assert found[0] == found[1]
