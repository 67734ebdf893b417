"""vLLM on a CPU: `LLM` as it comes, in this process and with tokens for text, from a build of its CPU target."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import protocol

CACHE_GIB = 4
PRELOADED = (Path(sys.prefix) / "lib" / "libiomp5.so", *Path("/usr/lib").glob("*/libtcmalloc_minimal.so.4"))
"""What its manual says to load before anything else, as far as it is here."""


class VllmCpu:
    """The defaults of `LLM(...)` but for the threads, the room for keys and values, and no tokenizer. Graphs are compiled at start."""

    def __init__(self, model: Path, threads: int) -> None:
        os.environ |= {
            "VLLM_CPU_KVCACHE_SPACE": str(CACHE_GIB), "VLLM_CPU_OMP_THREADS_BIND": f"0-{threads - 1}",
            "VLLM_LOGGING_LEVEL": "WARNING", "VLLM_NO_USAGE_STATS": "1",
        }  # fmt: skip
        import vllm

        self._vllm = vllm
        self._llm = vllm.LLM(str(model), dtype="bfloat16", skip_tokenizer_init=True)

    def generate(self, prompts: list[list[int]], lengths: list[int]) -> list[list[int]]:
        params = [
            self._vllm.SamplingParams(temperature=0, max_tokens=length, ignore_eos=True, detokenize=False) for length in lengths
        ]
        asked = [{"prompt_token_ids": prompt} for prompt in prompts]
        return [list(answer.outputs[0].token_ids) for answer in self._llm.generate(asked, params, use_tqdm=False)]

    def about(self) -> dict[str, Any]:
        import torch

        preloaded = [path.name for path in PRELOADED if path.is_file()]
        return {"vllm": self._vllm.__version__, "torch": torch.__version__, "cache_gib": CACHE_GIB, "preloaded": preloaded}

    def roots(self) -> list[int]:
        return [os.getpid()]

    def close(self) -> None:
        del self._llm


if __name__ == "__main__":
    os.environ.pop("OMP_NUM_THREADS", None)  # with it vLLM has threads for all else too: two thirds of the speed
    if "LD_PRELOAD" not in os.environ:
        os.environ["LD_PRELOAD"] = ":".join(str(path) for path in PRELOADED if path.is_file())
        os.execv(sys.executable, [sys.executable, *sys.argv])
    protocol.run(VllmCpu)
