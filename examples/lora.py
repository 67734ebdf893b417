"""One model with several LoRA adapters, in one batch: python examples/lora.py [MODEL ADAPTER ...]

Each request names its adapter, or none, and all are computed together. An adapter is a folder that PEFT's `save_pretrained` wrote;
without arguments the demo model gets two random ones, whose answers are nonsense of different kinds.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from vnext import LLM, LoRARequest, SamplingParams
from vnext.runtime.processes.launch import DEMO_MODEL

PROMPT = "The module"
RANK = 4


def random_adapter(model: Path, folder: Path, seed: int) -> Path:
    """An adapter of the attention's queries and values, in PEFT's files."""
    rng, tensors = torch.Generator().manual_seed(seed), {}
    for name, weight in load_file(model / "model.safetensors").items():
        if name.endswith(("q_proj.weight", "v_proj.weight")):
            module = f"base_model.model.{name.removesuffix('.weight')}"
            tensors[f"{module}.lora_A.weight"] = torch.randn(RANK, weight.shape[1], generator=rng) * 0.1
            tensors[f"{module}.lora_B.weight"] = torch.randn(weight.shape[0], RANK, generator=rng)
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    settings = {"peft_type": "LORA", "r": RANK, "lora_alpha": RANK, "target_modules": ["q_proj", "v_proj"], "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    return folder


def main() -> None:
    with tempfile.TemporaryDirectory() as own:
        model, *folders = sys.argv[1:] or [str(DEMO_MODEL)]
        adapters = [Path(each) for each in folders] or [random_adapter(DEMO_MODEL, Path(own) / f"random-{at}", at) for at in (1, 2)]
        requests = [None, *(LoRARequest(folder.name, lora_path=str(folder)) for folder in adapters)]
        with LLM(model, enable_lora=True, max_loras=len(adapters), log="off") as llm:
            params = SamplingParams(temperature=0, max_tokens=24)
            answers = llm.generate([PROMPT] * len(requests), params, use_tqdm=False, lora_request=requests)
        for request, answer in zip(requests, answers):
            print(f"{request.lora_name if request else 'no adapter'}: {answer.outputs[0].text!r}")


if __name__ == "__main__":
    main()
