"""The pages in which a rank keeps the states of recurrent layers, and the copies among them that a step begins and ends with."""

from __future__ import annotations

from collections.abc import Callable

from vnext.kernels.arrays import torch_dtype
from vnext.models.config.model_config import ModelConfig
from vnext.models.layers.batch import ForwardBatch
from vnext.models.layers.recurrent import copy_states, make_state_pools
from vnext.runtime.batch.step_inputs import StepInputs
from vnext.runtime.batch.step_outputs import StepOutputs
from vnext.runtime.protocol.settings import RankSettings, SettingsError

Compute = Callable[[StepInputs], StepOutputs]


class StatePools:
    """Which page is whose is the state's business (vnext/state/recurrent.py)."""

    def __init__(self, config: ModelConfig, page_count: int, dtype: str, world_size: int) -> None:
        self.pools = make_state_pools(config, page_count, torch_dtype(dtype), "cpu", world_size)
        self._given: ForwardBatch | None = None
        self._forward: ForwardBatch | None = None

    def run(self, inputs: StepInputs, compute: Compute) -> StepOutputs:
        """One step: its rows go on from their pages and leave their states there."""
        states, copies = inputs.forward.recurrent, inputs.copies
        assert states is not None and copies is not None, "the state has recurrent layers"
        if inputs.forward is not self._given:  # a batch that comes again stays the same object
            self._given, self._forward = inputs.forward, inputs.forward._replace(recurrent=states._replace(pools=self.pools))
        assert self._forward is not None
        copy_states(self.pools, copies.before)
        outputs = compute(inputs._replace(forward=self._forward))
        copy_states(self.pools, copies.after)
        return outputs


def require_plain_steps(settings: RankSettings, config: ModelConfig, device: str) -> None:
    """Raise SettingsError for what does not go with recurrent layers, encoders or unlike layers yet."""
    kinds = {
        "models with recurrent layers": config.recurrent is not None, "encoders": config.encoder is not None,
        "models with unlike layers": config.has_unlike_layers,
    }  # fmt: skip
    served = next((kind for kind, is_one in kinds.items() if is_one), "")
    if not served:
        return
    others = {
        "--device cuda": device != "cpu", "--pipeline-parallel-size": settings.pipeline_parallel_size > 1,
        "--speculative-config": bool(settings.draft_method) and not config.has_unlike_layers,
    }  # fmt: skip
    for option, is_given in others.items():
        if is_given:
            raise SettingsError(f"{option} does not serve {served} so far, and this is one: leave it out")
