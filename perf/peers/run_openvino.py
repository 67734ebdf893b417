"""OpenVINO GenAI: its continuous-batching pipeline on the CPU, with token ids."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import protocol

BATCH_TOKENS_MAX = 2048  # as in vnext; its own default, 256, is meant for latency under load and slows long prompts


class OpenVino:
    """Weights as converted, or of a GGUF file as the pipeline takes them; precision of arithmetic and cache as the plugin chooses them."""

    def __init__(self, model: Path, threads: int) -> None:
        import numpy
        import openvino
        import openvino_genai

        self._numpy, self._openvino, self._genai = numpy, openvino, openvino_genai
        scheduling = openvino_genai.SchedulerConfig()
        scheduling.max_num_batched_tokens = BATCH_TOKENS_MAX
        scheduling.enable_prefix_caching = True
        properties = {"INFERENCE_NUM_THREADS": threads}
        if precision := os.environ.get("PEERS_OPENVINO_PRECISION"):
            properties["INFERENCE_PRECISION_HINT"] = precision
        self._pipeline = openvino_genai.ContinuousBatchingPipeline(str(model), scheduling, "CPU", properties)

    def generate(self, prompts: list[list[int]], lengths: list[int]) -> list[list[int]]:
        tensors = [self._openvino.Tensor(self._numpy.array([prompt], self._numpy.int64)) for prompt in prompts]
        results = self._pipeline.generate(tensors, [self._asked(length) for length in lengths])
        return [result.m_generation_ids[0] for result in results]

    def _asked(self, length: int) -> Any:
        """Greedy and of that length. The pipeline insists on an end token even where it is to be ignored."""
        ends = {"eos_token_id": 0, "stop_token_ids": {0}, "ignore_eos": True}
        return self._genai.GenerationConfig(do_sample=False, max_new_tokens=length, min_new_tokens=length, **ends)

    def about(self) -> dict[str, Any]:
        core = self._openvino.Core()
        names = ("INFERENCE_PRECISION_HINT", "KV_CACHE_PRECISION")
        chosen = {name: str(core.get_property("CPU", name)) for name in names}
        versions = {"openvino": self._openvino.__version__, "openvino_genai": self._genai.__version__}
        return versions | chosen | {"max_num_batched_tokens": BATCH_TOKENS_MAX, "enable_prefix_caching": True}

    def roots(self) -> list[int]:
        return [os.getpid()]

    def close(self) -> None:
        del self._pipeline


if __name__ == "__main__":
    protocol.run(OpenVino)
