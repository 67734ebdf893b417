"""A tower alone: the runner of an engine that encodes images and sounds for others, with none of the decoder's weights.

Its steps compute the inputs that begin in them, put their vectors where other engines' ranks find them, and sample the token 0,
which nobody reads. One rank of an engine computes; the others keep step.
"""

from __future__ import annotations

from pathlib import Path
from typing import cast

import numpy as np
from msgspec.structs import replace

from vnext.models.config.model_config import load_config
from vnext.models.layers.sharding import Parallel
from vnext.models.loading.weights import Progress
from vnext.runtime.batch.step_inputs import StepInputs
from vnext.runtime.batch.step_outputs import NOTHING_SAMPLED, StepOutputs
from vnext.runtime.protocol.settings import RankSettings
from vnext.runtime.rank.by_parts import ByParts
from vnext.runtime.rank.images import Inputs
from vnext.runtime.rank.runner import ModelRunner


class Parts:
    """What other ranks keep in ByParts: the tower, None on a rank that does not compute."""

    inputs: Inputs | None = None


class TowerRunner(ModelRunner):
    """See the module. Its pages hold nothing."""

    def __init__(self, settings: RankSettings, parallel: Parallel) -> None:
        """Raises ModelError, SettingsError."""
        path = Path(settings.model_path)
        config = load_config(path, settings.generation_config == "auto", settings.max_model_len)
        alone = replace(config, windows=(), recurrent=None, experts=None, cache_layers=(), still_layers=(), whole_heads=None)
        super().__init__(path, settings.bare, "cpu", parallel, config=alone)
        self.__dict__["parts"] = cast(ByParts, Parts())

    def _load(self, progress: Progress | None) -> None:
        """There are no weights but the tower's."""

    def measure_splits(self, known: Path) -> None:
        """No rank sums with others."""

    def token_bytes(self) -> int:
        return 0

    def make_cache(self, page_count: int, block_size: int, state_pages: int = 0, drafts: int = 0) -> None:
        """No page has memory."""

    def run(self, inputs: StepInputs) -> StepOutputs:
        """Compute the inputs of a step, which are in files when this returns. Raises ModelError."""
        if (tower := self.parts.inputs) is not None:
            for part in inputs.forward.inputs:
                tower.vectors(part.digest)
        if inputs.sampling is None:
            return NOTHING_SAMPLED
        return StepOutputs(np.zeros(len(inputs.forward.sample_at), dtype=np.int64), ())
