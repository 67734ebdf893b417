"""Adapters for tests: random ones as PEFT would write them, for any model."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

import vnext

DEMO = Path(vnext.__file__).parent / "demo_model"
LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def save_adapter(
    model: Path, folder: Path, seed: int = 0, rank: int = 4, targets: Sequence[str] = LINEAR, **settings: Any
) -> Path:
    """A random adapter of the checkpoint in `model`, in `folder`."""
    rng, tensors = torch.Generator().manual_seed(seed), {}
    for name, weight in load_file(str(model / "model.safetensors")).items():
        module = name.removesuffix(".weight")
        if module != name and module.rpartition(".")[2] in targets:
            tensors[f"base_model.model.{module}.lora_A.weight"] = torch.randn(rank, weight.shape[1], generator=rng) * 0.1
            tensors[f"base_model.model.{module}.lora_B.weight"] = torch.randn(weight.shape[0], rank, generator=rng) * 0.3
    raw = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "target_modules": list(targets), "bias": "none"}
    return write(folder, {**raw, **settings}, tensors)


def write(folder: Path, settings: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    save_file(dict(tensors), str(folder / "adapter_model.safetensors"))
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    return folder


def save_spoilt(model: Path, folder: Path, how: str) -> Path:
    """A random adapter with one tensor that does not fit the checkpoint, or with one that is missing or strange."""
    save_adapter(model, folder)
    settings = json.loads((folder / "adapter_config.json").read_text())
    return write(folder, settings, _spoilt(load_file(str(folder / "adapter_model.safetensors")), how))


def _spoilt(tensors: dict[str, torch.Tensor], how: str) -> dict[str, torch.Tensor]:
    name = "base_model.model.model.layers.1.mlp.up_proj.lora_B.weight"
    match how:
        case "shape":
            return {**tensors, name: torch.zeros(7, 4)}
        case "empty":
            return {}
        case "missing":
            return {key: value for key, value in tensors.items() if key != name}
        case "target":
            return {**tensors, "base_model.model.lm_head.lora_A.weight": torch.zeros(4, 64)}
        case "layer":
            return {**tensors, name.replace("layers.1", "layers.9"): tensors[name].clone()}
        case "kind":
            return {**tensors, name.replace("lora_B.weight", "lora_magnitude_vector"): torch.zeros(4)}
        case "dtype":
            return {**tensors, name: tensors[name].to(torch.int32)}
    return {**tensors, name: tensors[name] / 0}


def merge(model: Path, adapter: Path, folder: Path) -> Path:
    """The checkpoint with the adapter in its weights, in float32."""
    weights, parts = load_file(str(model / "model.safetensors")), load_file(str(adapter / "adapter_model.safetensors"))
    settings = json.loads((adapter / "adapter_config.json").read_text())
    scale = settings["lora_alpha"] / (settings["r"] ** 0.5 if settings.get("use_rslora") else settings["r"])
    for name in [name for name in parts if name.endswith(".lora_B.weight")]:
        module = name.removeprefix("base_model.model.").removesuffix(".lora_B.weight")
        change = parts[name].double() @ parts[name.replace("lora_B", "lora_A")].double() * scale
        weights[f"{module}.weight"] = (weights[f"{module}.weight"].double() + change).float()
    folder.mkdir(parents=True, exist_ok=True)
    for path in model.iterdir():
        if path.is_file():
            (folder / path.name).write_bytes(path.read_bytes())
    save_file(weights, str(folder / "model.safetensors"), metadata={"format": "pt"})
    return folder
