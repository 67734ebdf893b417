"""vnext as a library: LLM(...).generate with token ids."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

import protocol

CHOSEN = {"isa": "auto", "kv_cache_dtype": "auto", "quantization": "auto", "activations": "auto", "packed_weights_dir": ""}
"""Settings that the environment may name, with their defaults."""


class Vnext:
    """The defaults of `LLM(...)`, but for the device, the threads, the place of the log and what the environment names.

    `LLM` reads no environment; here VNEXT_ISA, VNEXT_KV_CACHE_DTYPE, VNEXT_QUANTIZATION, VNEXT_ACTIVATIONS and
    VNEXT_PACKED_WEIGHTS_DIR mean what they mean to `vnext serve`.
    """

    def __init__(self, model: Path, threads: int) -> None:
        from vnext import LLM, SamplingParams

        self._params = SamplingParams
        self._logs = tempfile.TemporaryDirectory()
        self._chosen = {name: os.environ.get(f"VNEXT_{name.upper()}", usual) for name, usual in CHOSEN.items()}
        self._llm = LLM(model, device="cpu", threads=threads, log_dir=self._logs.name, **self._chosen)

    def generate(self, prompts: list[list[int]], lengths: list[int]) -> list[list[int]]:
        params = [self._params(temperature=0.0, max_tokens=length, ignore_eos=True) for length in lengths]
        return [answer.outputs[0].token_ids for answer in self._llm.generate(prompts, params, use_tqdm=False)]

    def about(self) -> dict[str, Any]:
        from vnext.base.version import __version__
        from vnext.commands.machine import library_version

        return {"vnext": __version__, "torch": library_version("torch"), **self._chosen} | {
            "packed_weights_dir": "given" if self._chosen["packed_weights_dir"] else ""
        }

    def roots(self) -> list[int]:
        return [os.getpid()]

    def close(self) -> None:
        self._llm.close()
        self._logs.cleanup()


if __name__ == "__main__":
    protocol.run(Vnext)
