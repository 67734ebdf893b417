"""Stages: the layers of a model in as many runs as a pipeline has stages, and the configuration of one of them.

A stage is a model of its own layers, which keep their numbers in the checkpoint and their groups in the cache.
"""

from __future__ import annotations

from msgspec.structs import replace

from vnext.models.config.layer_kinds import Stage
from vnext.models.config.model_config import ModelConfig
from vnext.models.errors import ModelError


def layer_counts(layer_count: int, stage_count: int) -> tuple[int, ...]:
    """How many layers each stage has, as evenly as possible: of those that remain, the stages before the last get one each, the
    later ones first. The last has the head instead. The rule is vLLM's (distributed/utils.py, get_pp_indices)."""
    least, more = divmod(layer_count, stage_count)
    return tuple(least + (stage_count - 1 - more <= stage < stage_count - 1) for stage in range(stage_count))


def of_stage(config: ModelConfig, stage: int, stage_count: int) -> ModelConfig:
    """The configuration of one stage of a model. Raises ModelError for more stages than layers."""
    if stage_count == 1:
        return config
    if stage_count > config.layer_count:
        raise ModelError(
            f"{config.layer_count} layers do not split over {stage_count} stages: lower --pipeline-parallel-size to at most "
            f"{config.layer_count}"
        )
    if config.joined:
        raise ModelError("stages hand on one stream, and this model has several: leave --pipeline-parallel-size out")
    counts = layer_counts(config.layer_count, stage_count)
    first = sum(counts[:stage])
    if config.latent and config.latent.index and first in config.latent.index.shared:
        raise ModelError(f"stage {stage} would begin with layer {first}, which sees what another chooses: choose other stages")
    if config.experts and config.experts.ahead and first in config.experts.dense_layers:
        raise ModelError(f"stage {stage} would begin with layer {first}, to which another's experts add: choose other stages")
    numbers = range(first, first + counts[stage])
    windows = config.windows or (0,) * config.layer_count
    return replace(
        config,
        layer_count=len(numbers),
        windows=config.windows[first : numbers.stop],
        still_layers=tuple(layer - first for layer in config.still_layers if layer in numbers),
        stage=Stage(index=stage, count=stage_count, first_layer=first, windows=windows),
    )
