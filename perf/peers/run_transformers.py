"""transformers: `generate` in eager mode, a batch as one padded rectangle up to the end of its longest answer."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import protocol


class Transformers:
    """bfloat16, SDPA attention (the default). Prompts are padded on the left and masked."""

    def __init__(self, model: Path, threads: int) -> None:
        import torch
        import transformers

        torch.set_num_threads(threads)
        transformers.utils.logging.set_verbosity_error()
        self._torch, self._version = torch, transformers.__version__
        self._model = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16).eval()

    def generate(self, prompts: list[list[int]], lengths: list[int]) -> list[list[int]]:
        torch = self._torch
        width = max(map(len, prompts))
        tokens = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts])
        mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        with torch.inference_mode():
            output = self._model.generate(
                tokens, attention_mask=mask, do_sample=False, max_new_tokens=max(lengths), eos_token_id=None,
                pad_token_id=0,
            )  # fmt: skip
        return [row[width : width + length] for row, length in zip(output.tolist(), lengths)]

    def about(self) -> dict[str, Any]:
        attention = self._model.config._attn_implementation
        return {"transformers": self._version, "torch": self._torch.__version__, "attention": attention}

    def roots(self) -> list[int]:
        return [os.getpid()]

    def close(self) -> None:
        del self._model


if __name__ == "__main__":
    protocol.run(Transformers)
