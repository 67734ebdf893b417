"""LoRA adapters: as PEFT computes them, on one rank and on two; a row's bits whatever the rows beside it; bad folders."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from device_twin import TwinDevice
from family_cases import CASES, VOCAB_SIZE, Case, save_case
from model_helpers import Chunk, Model, ThreadGroup, make_batch
from safetensors.torch import load_file, save_file
from saved_adapters import LINEAR, save_adapter, save_spoilt

from vnext.kernels.thin_tiles import ThinTiles, make_tiles
from vnext.models.config.adapter_config import adapter_digest, read_adapter_settings
from vnext.models.config.model_config import load_config
from vnext.models.errors import ModelError
from vnext.models.layers.adapted import AdaptedForward, Adapter
from vnext.models.layers.batch import AdapterRows, ForwardBatch
from vnext.models.layers.kv_cache import kv_groups, make_kv_cache
from vnext.models.layers.sharding import Parallel, alone
from vnext.models.layers.whole_step import whole_step
from vnext.models.loading.adapter import Base, adapted_products, load_adapter
from vnext.models.loading.kept import Kept
from vnext.models.loading.weights import load_params
from vnext.models.registry import family
from vnext.runtime.gpu.adapter_regions import AdaptedProduct, AdapterRegions
from vnext.runtime.gpu.model import DeviceModel
from vnext.sampling.inputs import SamplingInputs

sys.path.append(str(Path(__file__).resolve().parents[1] / "kernels"))  # cpu_levels is shared with the kernels' tests
from cpu_levels import needs_native

LLAMA = Case("LlamaForCausalLM", "LlamaConfig", {})
FAMILIES = ("llama", "qwen3", "phi3", "gpt2", "gemma3", "olmo2")
TOKENS = torch.randint(0, VOCAB_SIZE, (60,), generator=torch.Generator().manual_seed(3)).tolist()
RANK_MAX = 64


@pytest.fixture(scope="module", autouse=True)
def llama_case() -> Any:
    CASES["llama"] = LLAMA
    yield
    del CASES["llama"]


def load(path: Path, folders: Sequence[Path], parallel: Parallel | None = None, dtype: torch.dtype = torch.float32) -> tuple[Model, list[Adapter]]:
    """A model and its adapters, one for each slot."""
    parallel, config, kept = parallel or alone(), load_config(path), Kept()
    params = load_params(path, config, parallel, dtype, "cpu", kept=kept)
    pages = 64 * len(kv_groups(config).windows)
    model = Model(family(config.architecture), params, make_kv_cache(config, pages, 16, dtype, "cpu", parallel), config, parallel)
    base = Base(config, parallel, kept.targets, path)
    return model, [load_adapter(folder, adapter_digest(folder), base, RANK_MAX) for folder in folders]


def logits(model: Model, slots: Sequence[Adapter], chunks: Sequence[Chunk], uses: Sequence[int | None]) -> torch.Tensor:
    """Logits [T, V] of one step in which row r is computed with the adapter in slot uses[r]."""
    batch = with_adapters(make_batch(chunks, 16, len(kv_groups(model.config).windows)), chunks, uses)
    forward = AdaptedForward(model.family.forward, slots, "cpu") if batch.adapters else model.family.forward
    hidden, _ = forward(model.params, model.kv, batch, model.config, model.parallel)
    return model.family.logits(model.params, hidden, model.config, model.parallel)


def with_adapters(batch: ForwardBatch, chunks: Sequence[Chunk], uses: Sequence[int | None]) -> ForwardBatch:
    places: dict[int, list[int]] = {}
    first = 0
    for chunk, slot in zip(chunks, uses):
        if slot is not None:
            places.setdefault(slot, []).extend(range(first, first + len(chunk.tokens)))
        first += len(chunk.tokens)
    return batch._replace(adapters=tuple(AdapterRows(slot, np.array(places[slot])) for slot in sorted(places)))


def peft_adapter(model: torch.nn.Module, folder: Path, **settings: Any) -> torch.nn.Module:
    """A random adapter of all linear layers, saved by PEFT, and the model with it merged in."""
    import peft

    torch.manual_seed(5)
    chosen = peft.LoraConfig(r=6, lora_alpha=9, target_modules="all-linear", init_lora_weights=False, **settings)
    wrapped = peft.get_peft_model(model, chosen)
    wrapped.save_pretrained(folder)
    return wrapped.merge_and_unload()


def close(found: torch.Tensor, expected: torch.Tensor) -> None:
    """Within 1e-5 of the largest logit, and the same greedy tokens."""
    assert (found - expected).abs().max() <= 1e-5 * expected.abs().max()
    assert torch.equal(found.argmax(-1), expected.argmax(-1))


@pytest.mark.parametrize("name", FAMILIES)
def test_as_peft_computes_them(name: str, tmp_path: Path) -> None:
    merged = peft_adapter(save_case(tmp_path / "base", name), tmp_path / "adapter", use_rslora=name == "qwen3").eval()
    with torch.inference_mode():
        expected = merged(torch.tensor([TOKENS])).logits[0]
    chunk = Chunk(TOKENS, 0, range(4))
    model, slots = load(tmp_path / "base", [tmp_path / "adapter"])
    found = logits(model, slots, [chunk], [0])
    close(found, expected)
    assert (found - logits(model, slots, [chunk], [None])).abs().max() > 0.1

    def on_rank(parallel: Parallel) -> torch.Tensor:
        return logits(*load(tmp_path / "base", [tmp_path / "adapter"], parallel), [chunk], [0])

    for each in ThreadGroup(2).run(on_rank):
        assert torch.equal(each, found)
    for found in (on_device(tmp_path, alone()), *ThreadGroup(2).run(partial(on_device, tmp_path))):
        close(found, expected)


PATTERNS = {
    "rank_pattern": {r"layers\.1\.self_attn\.q_proj": 3, "v_proj": 9, "^model.layers.0.mlp.up_proj": 2},
    "alpha_pattern": {r"layers\.[01]\.mlp\.\w+": 3, "o_proj": 21.5},
}


@pytest.mark.parametrize("use_rslora", [False, True])
def test_ranks_and_scales_of_single_modules(use_rslora: bool, tmp_path: Path) -> None:
    merged = peft_adapter(save_case(tmp_path / "base", "llama"), tmp_path / "adapter", **PATTERNS, use_rslora=use_rslora).eval()
    ranks = {each.shape[0] for name, each in load_file(tmp_path / "adapter/adapter_model.safetensors").items() if "lora_A" in name}
    assert ranks == {2, 3, 6, 9}
    with torch.inference_mode():
        expected = merged(torch.tensor([TOKENS])).logits[0]
    model, slots = load(tmp_path / "base", [tmp_path / "adapter"])
    close(logits(model, slots, [Chunk(TOKENS, 0, range(4))], [0]), expected)
    close(on_device(tmp_path, alone()), expected)


@pytest.mark.parametrize("saved", ["base_model.model.model.language_model.", "base_model.model.model.", "model.", "base_model.model."])
@pytest.mark.parametrize("root", ["language_model.model.", "model.language_model.", "model.", ""])
def test_a_layer_s_name_may_begin_otherwise_in_the_adapter(root: str, saved: str, tmp_path: Path) -> None:
    """Gemma 3's wrapper, its language part alone, in the names of older files and of today; and names without PEFT's prefix."""
    save_case(tmp_path, "gemma3")
    folder = save_adapter(tmp_path, tmp_path / "adapter")
    chunk = Chunk(TOKENS, 0, range(4))
    expected = logits(*load(tmp_path, [folder]), [chunk], [0])
    rename(tmp_path / "model.safetensors", "model.", root)
    rename(folder / "adapter_model.safetensors", "base_model.model.model.", saved)
    assert torch.equal(logits(*load(tmp_path, [folder]), [chunk], [0]), expected)


def rename(file: Path, old: str, new: str) -> None:
    save_file({name.replace(old, new, 1): tensor.clone() for name, tensor in load_file(file).items()}, file)


def renamed(folder: Path, old: str, new: str) -> Path:
    rename(folder / "adapter_model.safetensors", old, new)
    return folder


@pytest.mark.parametrize("own", ["default", "my-adapter"])
def test_tensors_may_have_the_names_that_they_have_in_memory(own: str, base: Path, tmp_path: Path) -> None:
    saved = save_adapter(base, tmp_path / "saved", rank_pattern={"q_proj": 4}, use_rslora=True)
    raw = save_adapter(base, tmp_path / "raw", rank_pattern={"q_proj": 4}, use_rslora=True)
    renamed(renamed(raw, "lora_A.", f"lora_A.{own}."), "lora_B.", f"lora_B.{own}.")
    model, slots = load(base, [saved, raw])
    one, other = (logits(model, slots, [Chunk(TOKENS, 0, range(4))], [slot]) for slot in (0, 1))
    assert torch.equal(one, other)


def test_tensors_of_two_adapters_are_refused(base: Path, tmp_path: Path) -> None:
    folder = renamed(save_adapter(base, tmp_path), "layers.0.self_attn.q_proj.lora_A.", "layers.0.self_attn.q_proj.lora_A.other.")
    with pytest.raises(ModelError, match="has tensors of 2 adapters, such as .*: save each in a folder of its own") as refused:
        load(base, [folder])
    assert "\n" not in str(refused.value)


LEFT = {
    "layers.0.mlp.up_proj.base_layer.weight": "which is the base's: save the adapter alone",
    "lm_head.original_module.weight": "which is the base's: save the adapter alone",
    "lm_head.modules_to_save.default.weight": "which is a whole module beside the adapter",
    "layers.0.mlp.up_proj.lora_magnitude_vector.default.weight": "of weights that are decomposed",
    "embed_tokens.lora_embedding_A.default": "of an adapted embedding",
    "layers.0.mlp.up_proj.lora_A.default.bias": "which is neither lora_A nor lora_B of a linear layer",
}


@pytest.mark.parametrize("name", LEFT)
def test_a_tensor_that_is_not_read_is_refused_by_its_name(name: str, base: Path, tmp_path: Path) -> None:
    folder = save_adapter(base, tmp_path)
    tensors = load_file(folder / "adapter_model.safetensors") | {f"base_model.model.model.{name}": torch.zeros(4, 4)}
    save_file(tensors, folder / "adapter_model.safetensors")
    with pytest.raises(ModelError, match=LEFT[name]) as refused:
        load(base, [folder])
    assert name in str(refused.value) and "\n" not in str(refused.value)


def test_members_that_are_not_known_are_named(base: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    load(base, [save_adapter(base, tmp_path / "usual", lora_dropout=0.1, peft_version="0.21.0", new_one=None)])
    assert not caplog.messages
    load(base, [save_adapter(base, tmp_path / "newer", gate_config={"kind": 1}, use_more=True)])
    (said,) = caplog.messages
    assert said.endswith("some is not read, though elsewhere answers may depend on it: gate_config, use_more.")


@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt2"])
def test_copies_of_the_embedding_and_the_head_may_lie_beside_an_adapter(name: str, tmp_path: Path) -> None:
    """PEFT saves them where it cannot tell that nothing changed."""
    peft_adapter(save_case(tmp_path, name), tmp_path / "adapter")
    file, chunk = tmp_path / "adapter" / "adapter_model.safetensors", Chunk(TOKENS, 0, range(4))
    expected = logits(*load(tmp_path, [file.parent]), [chunk], [0])
    tensors, whole = load_file(file), load_file(tmp_path / "model.safetensors")
    kind, embedding = next((key, each) for key, each in whole.items() if key.endswith(("embed_tokens.weight", "wte.weight")))
    head = whole.get("lm_head.weight", embedding)
    copies = {f"base_model.model.{kind}": embedding.bfloat16(), "base_model.model.lm_head.weight": head.clone()}
    save_file(tensors | copies, file)
    assert torch.equal(logits(*load(tmp_path, [file.parent]), [chunk], [0]), expected)
    for changed in copies:
        for other in (copies[changed] + 1, torch.cat((copies[changed], copies[changed][:1]))):
            save_file(tensors | copies | {changed: other}, file)
            with pytest.raises(ModelError, match="is not the base's: new embeddings and heads are not supported"):
                load(tmp_path, [file.parent])


def on_device(folder: Path, parallel: Parallel) -> torch.Tensor:
    """Logits of TOKENS with the adapter, in the form of a device's steps."""
    config, kept = load_config(folder / "base"), Kept()
    params = load_params(folder / "base", config, parallel, torch.float32, "cpu", kept=kept)
    kv = make_kv_cache(config, 64 * len(kv_groups(config).windows), 16, torch.float32, "cpu", parallel)
    base = Base(config, parallel, kept.targets, folder / "base")
    regions = AdapterRegions(TwinDevice(), [AdaptedProduct(*each) for each in adapted_products(base)], 1, RANK_MAX)
    digest = adapter_digest(folder / "adapter")
    region = regions.begin(digest, load_adapter(folder / "adapter", digest, base, RANK_MAX, regions.room()))
    regions.use(region)
    model = DeviceModel(family(config.architecture), params, kv, config, parallel, regions, parallel)
    batch = make_batch([Chunk(TOKENS, 0, range(4))], 16, len(kv_groups(config).windows))
    tiles = ThinTiles(*map(torch.from_numpy, make_tiles([(region.index, np.arange(len(TOKENS)))])))
    return model.logits(model.hidden(batch._replace(tiles=tiles)))


@needs_native
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["llama", "qwen3", "phi3", "gemma3"])
def test_a_whole_step_has_the_bits_of_its_parts(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """With rows of several adapters and of none, adapters of some layers only, and slots that change between steps."""
    save_case(tmp_path / "base", name)
    targets = [{"targets": chosen} for chosen in (("qkv_proj", "gate_up_proj") if name == "phi3" else ("k_proj", "up_proj"), LINEAR)]
    adapters = [save_adapter(tmp_path / "base", tmp_path / str(seed), seed, 5 + 13 * seed, **each) for seed, each in enumerate(targets)]
    model, slots = load(tmp_path / "base", adapters, dtype=dtype)
    assert model.params.stack is not None
    groups = len(kv_groups(model.config).windows)
    plain_kv, kv = (make_kv_cache(model.config, 64 * groups, 16, dtype, "cpu", alone(), together=True) for _ in range(2))
    whole = whole_step(model.params, kv, model.config, alone(), slots)
    assert whole is not None
    parts = AdaptedForward(model.family.forward, slots, "cpu")
    steps = [[Chunk(TOKENS[:28], 0, (0, 1)), Chunk(TOKENS[:9], 0, (2,)), Chunk(TOKENS[30:50], 0, (3, 4))]]
    steps += [[Chunk(TOKENS[at : at + 1], first + at, pages) for first, pages in ((28, (0, 1)), (9, (2,)), (20, (3, 4)))] for at in range(4)]
    for step, uses in zip(steps, ((0, None, 1), (0, None, 1), (0, None, 1), (1, 1, 0), (None, None, None))):
        batch = with_adapters(make_batch(step, 16, groups), step, uses)
        batch = batch._replace(sample_at=batch.query_starts[1:].long() - 1)
        zeros = torch.zeros(len(step), dtype=torch.int64)
        sampling = SamplingInputs(zeros.float(), zeros, zeros + 1.0, zeros.float(), zeros, zeros)
        forward = parts if batch.adapters else model.family.forward
        for _ in range(2):
            hidden, _ = forward(model.params, plain_kv, batch, model.config, alone())
            expected = model.family.logits(model.params, hidden, model.config, alone()).argmax(-1)
            assert whole.run(batch, sampling).tolist() == expected.tolist()
            assert all(torch.equal(*pair) for ours, theirs in zip(kv, plain_kv) for pair in zip(ours, theirs))
            slots.reverse()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["llama", "phi3", "gemma3"])
def test_neighbours_change_no_bit(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """Neither other adapters nor the cut of a prompt; and a row without one has the bits of an engine without adapters."""
    save_case(tmp_path / "base", name)
    fused = ("qkv_proj", "gate_up_proj", "o_proj", "down_proj")
    targets = {"targets": fused} if name == "phi3" else {}
    folders = [save_adapter(tmp_path / "base", tmp_path / str(seed), seed, 4 + seed, **targets) for seed in range(3)]
    model, slots = load(tmp_path / "base", folders, dtype=dtype)
    uses, rows = (0, None, 2, 1, 0), [Chunk(TOKENS[at : at + 20], 0, range(2 * at, 2 * at + 2)) for at in range(5)]
    together = logits(model, slots, rows, uses).split(20)
    for row, slot, found in zip(rows, uses, together):
        alone_ = logits(*load(tmp_path / "base", folders, dtype=dtype), [row], [slot])
        assert torch.equal(found, alone_)
        model, slots = load(tmp_path / "base", folders, dtype=dtype)
        first = logits(model, slots, [row._replace(tokens=row.tokens[:7])], [slot])
        rest = logits(model, slots, [row._replace(tokens=row.tokens[7:], computed=7)], [slot])
        assert torch.equal(found, torch.cat((first, rest)))


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("base")
    CASES["llama"] = LLAMA
    save_case(path, "llama")
    return path


REFUSED = (
    ({"peft_type": "IA3"}, "only LORA is supported"),
    ({"use_dora": True}, "has use_dora"),
    ({"modules_to_save": ["lm_head"]}, "has modules_to_save"),
    ({"bias": "all"}, "has bias 'all'"),
    ({"rank_pattern": {"q_proj": 65}}, "has the rank 65, more than --max-lora-rank 64"),
    ({"rank_pattern": {"q_proj": 0}}, "rank_pattern of 'q_proj' must be a whole number of at least 1"),
    ({"rank_pattern": [2]}, "rank_pattern .2. *: it must be an object"),
    ({"alpha_pattern": {"q_proj": "x"}}, "alpha_pattern of 'q_proj' 'x': it must be a number"),
    ({"alpha_pattern": {"(q": 1}}, "the pattern '.q' in alpha_pattern, which is none"),
    ({"alpha_pattern": {"(a|b)+x": 1}}, "takes too long to match"),
    ({"init_lora_weights": "lora_ga"}, "was begun as 'lora_ga', which changed the base's weights"),
    ({"r": 65}, "has the rank 65, more than --max-lora-rank 64"),
    ({"r": "4"}, "r must be a whole number"),
    ({"lora_alpha": "x"}, "lora_alpha 'x'"),
)


@pytest.mark.parametrize("change, sentence", REFUSED, ids=[next(iter(change)) for change, _ in REFUSED])
def test_what_is_not_computed_exactly_is_refused(change: dict[str, Any], sentence: str, base: Path, tmp_path: Path) -> None:
    folder = save_adapter(base, tmp_path, **change)
    with pytest.raises(ModelError, match=sentence) as refused:
        read_adapter_settings(folder, RANK_MAX)
    assert "\n" not in str(refused.value)


def test_folders_that_hold_no_adapter(base: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="has no adapter_config.json"):
        read_adapter_settings(tmp_path)
    folder = save_adapter(base, tmp_path / "a")
    (folder / "adapter_config.json").write_text("[")
    with pytest.raises(ModelError, match="cannot be read as JSON"):
        read_adapter_settings(folder)


SPOILT = {
    "shape": r"has the shape \[7, 4\] where this model and the rank in adapter_config.json ask for \[120, 4\]",
    "missing": "the other half of one that it has",
    "target": "adapts 'lm_head', which is no linear layer",
    "layer": "adapts 'model.layers.9.mlp.up_proj'",
    "kind": "lora_magnitude_vector', of weights that are decomposed",
    "dtype": "has the dtype",
    "infinite": "not finite",
}


@pytest.mark.parametrize("how", SPOILT)
def test_tensors_that_do_not_fit(how: str, base: Path, tmp_path: Path) -> None:
    folder = save_spoilt(base, tmp_path, how)
    with pytest.raises(ModelError, match=SPOILT[how]) as refused:
        load(base, [folder])
    assert "\n" not in str(refused.value)


def test_other_files_than_were_named(base: Path, tmp_path: Path) -> None:
    folder, parallel, kept = save_adapter(base, tmp_path), alone(), Kept()
    load_params(base, load_config(base), parallel, torch.float32, "cpu", kept=kept)
    digest = adapter_digest(folder)
    save_adapter(base, tmp_path, seed=1)
    with pytest.raises(ModelError, match="has changed since it was named"):
        load_adapter(folder, digest, Base(load_config(base), parallel, kept.targets, base), RANK_MAX)
    assert adapter_digest(folder) != digest
