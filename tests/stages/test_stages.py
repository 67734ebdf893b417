"""A model in stages gives the logits of the whole model bit for bit: every family, cut at every place."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
import torch

sys.path.append(str(Path(__file__).resolve().parents[1] / "models"))
from family_cases import CASES, save_case
from hybrids import CASES as HYBRIDS
from model_helpers import Chunk, make_batch, with_aux

from vnext.kernels.arrays import host_dtype
from vnext.models.config.model_config import ModelConfig, load_config
from vnext.models.config.stages import layer_counts, of_stage
from vnext.models.errors import ModelError
from vnext.models.layers.kv_cache import kv_bytes_per_page, kv_groups, make_kv_cache
from vnext.models.layers.sharding import alone
from vnext.models.loading.weights import load_params
from vnext.models.registry import FAMILIES, family

CHUNKS = ([Chunk(list(range(5, 60)), 0, [9, 2, 30, 4]), Chunk([7, 8, 9], 0, [1])], [Chunk([60], 55, [9, 2, 30, 4]), Chunk([3], 3, [1])])
PAGES, BLOCK_SIZE = 40, 16


class StagedModel:
    """The stages of one checkpoint, each with its own parameters and cache."""

    def __init__(self, path: Path, config: ModelConfig, stage_count: int, dtype: torch.dtype) -> None:
        self.whole, self.dtype = config, dtype
        self.configs = [of_stage(config, stage, stage_count) for stage in range(stage_count)]
        self.params = [load_params(path, each, alone(), dtype, "cpu") for each in self.configs]
        pages = PAGES * len(kv_groups(config).windows)
        self.caches = [make_kv_cache(each, pages, BLOCK_SIZE, dtype, "cpu", alone()) for each in self.configs]

    @torch.inference_mode()
    def logits(self, chunks: list[Chunk]) -> torch.Tensor:
        """Logits [T, V] of every token of one step, through all stages."""
        module, states = family(self.whole.architecture), None
        for config, params, cache in zip(self.configs, self.params, self.caches):
            batch = make_batch(chunks, BLOCK_SIZE, len(kv_groups(self.whole).windows))._replace(states=states)
            if not config.is_last:
                batch = with_aux(batch, [config.layer_count], config.hidden_size, self.dtype)
            hidden, _ = module.forward(params, cache, batch, config, alone())
            states = None if config.is_last else batch.aux.states[:, 0].clone()
        logits: torch.Tensor = module.logits(params, hidden, config, alone())
        return logits


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", [name for name in CASES if not name.startswith(("gemma3n", "gemma4", "mimo_v2", "laguna"))])  # refused in stages
def test_stages_give_the_bits_of_the_whole(tmp_path: Path, name: str, dtype: torch.dtype) -> None:
    """Layers in one, two and three stages: a prompt beside another, and then a token of both."""
    save_case(tmp_path, name)
    config = load_config(tmp_path, asked_length=CASES[name].asked_length)
    counts = [1, 2, 3]
    if name == "glm_moe_dsa":  # its layer 1, with which the second of three stages would begin, sees what layer 0 has chosen
        with pytest.raises(ModelError, match="stage 1 would begin with layer 1, which sees what another chooses"):
            StagedModel(tmp_path, config, counts.pop(), dtype)
    if name == "longcat":  # to its layer 1 that of layer 0 adds, whose experts go ahead
        with pytest.raises(ModelError, match="stage 1 would begin with layer 1, to which another's experts add"):
            StagedModel(tmp_path, config, counts.pop(), dtype)
    if name == "hy_v4":  # each of its streams would have to go on
        with pytest.raises(ModelError, match="stages hand on one stream, and this model has several: leave"):
            StagedModel(tmp_path, config, counts.pop(), dtype)
        counts = [1]
    models = [StagedModel(tmp_path, config, count, dtype) for count in counts]
    for chunks in CHUNKS:
        expected, *found = [model.logits(chunks) for model in models]
        assert expected.isfinite().all() and all(torch.equal(each, expected) for each in found)


def test_every_family_is_among_the_cases() -> None:
    """But those that differ from one of them in their names alone, as a model's language part does, and those with recurrent layers
    and encoders, which are not cut into stages."""
    whole = {architecture for architecture, *_ in HYBRIDS.values()}
    whole |= {architecture for architecture, file in FAMILIES.items() if file.startswith("encoders.")}
    missing = FAMILIES.keys() - {case.architecture for case in CASES.values()} - whole
    missing = {name for name in missing if not name.endswith("ForConditionalGeneration")}
    renamed = {"BailingMoeForCausalLM", "BailingMoeV2ForCausalLM", "DeepseekForCausalLM"}
    assert missing == {"LlamaForCausalLM", "MiMoForCausalLM", "InternLM3ForCausalLM"} | renamed


@pytest.mark.parametrize(
    ("layers", "stages", "counts"),
    [(4, 1, (4,)), (4, 2, (2, 2)), (5, 2, (3, 2)), (7, 3, (2, 3, 2)), (8, 3, (3, 3, 2)), (6, 4, (1, 2, 2, 1)), (3, 3, (1, 1, 1))],
)
def test_layers_are_cut_as_evenly_as_possible(layers: int, stages: int, counts: tuple[int, ...]) -> None:
    assert layer_counts(layers, stages) == counts


def test_more_stages_than_layers_are_refused(tmp_path: Path) -> None:
    save_case(tmp_path, "qwen2")
    with pytest.raises(ModelError, match="3 layers do not split over 4 stages: lower --pipeline-parallel-size to at most 3"):
        of_stage(load_config(tmp_path), 0, 4)


def test_a_stage_holds_its_own_layers_alone(tmp_path: Path) -> None:
    """Parameters, tensors of the cache and bytes of a page; its groups are those of the whole model, of which one may be empty."""
    save_case(tmp_path, "gemma3")
    config = load_config(tmp_path)
    stages = [of_stage(config, stage, 3) for stage in range(3)]
    assert [list(each.layer_numbers) for each in stages] == [[0], [1], [2]]
    assert {kv_groups(each).windows for each in stages} == {kv_groups(config).windows}
    assert [kv_groups(each).group_of for each in stages] == [(group,) for group in kv_groups(config).group_of]
    numbers = host_dtype("float32")
    assert [kv_bytes_per_page(each, 16, numbers, alone()) for each in stages] == [kv_bytes_per_page(config, 16, numbers, alone())] * 3
    params = [load_params(tmp_path, each, alone(), numbers, "cpu") for each in stages]
    assert [each.embedding is None for each in params] == [False, True, True]
    assert [each.head is None for each in params] == [True, True, False]
    assert all(isinstance(each.norm, np.ndarray) and len(each.layers) == 1 for each in params)
