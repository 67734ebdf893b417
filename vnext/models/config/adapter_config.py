"""The folder of a LoRA adapter as PEFT writes it: adapter_config.json and adapter_model.safetensors.

Owns what vnext reads of the configuration, what it refuses, and the digest by which an adapter is known. Needs no torch.
"""

from __future__ import annotations

from hashlib import blake2b
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from vnext.models.config.json_keys import positive, read_json
from vnext.models.errors import ModelError

SETTINGS_NAME, WEIGHTS_NAME = "adapter_config.json", "adapter_model.safetensors"
RANK_MAX = 256
CHUNK_BYTES = 1 << 20
REFUSED = MappingProxyType(
    {
        "use_dora": "weights that are decomposed (DoRA)",
        "modules_to_save": "whole modules beside the adapter",
        "rank_pattern": "ranks of single modules",
        "alpha_pattern": "scales of single modules",
        "lora_bias": "biases",
        "layer_replication": "layers used twice",
        "trainable_token_indices": "new embeddings of tokens",
        "target_parameters": "parameters that are no linear layer",
        "use_qalora": "QALoRA",
        "alora_invocation_tokens": "tokens that switch the adapter on",
        "arrow_config": "routing between adapters",
        "corda_config": "a base that was changed for it",
    }
)
"""Member of adapter_config.json -> what it asks for."""
CHANGES_THE_BASE = ("pissa", "olora", "corda", "loftq")
"""Ways of beginning an adapter (init_lora_weights) that take something out of the base's weights."""


class AdapterSettings(NamedTuple):
    """What an adapter's product is: `scale` times up times down, both of this `rank`."""

    rank: int
    scale: float


def read_adapter_settings(folder: Path, rank_max: int = RANK_MAX) -> AdapterSettings:
    """The settings of the adapter in `folder`. Raises ModelError for one that vnext does not compute exactly."""
    for name in (SETTINGS_NAME, WEIGHTS_NAME):
        if not (folder / name).is_file():
            raise ModelError(f"{folder} has no {name}: name the folder that PEFT's save_pretrained wrote")
    raw = read_json(folder / SETTINGS_NAME)
    where = f"the adapter in {folder}"
    if (kind := raw.get("peft_type", "LORA")) != "LORA":
        raise ModelError(f"{where} is of type {kind!r}; only LORA is supported, so merge it into the weights")
    for member, what in REFUSED.items():
        if raw.get(member):
            raise ModelError(f"{where} has {member}: {what}; this is not supported, so merge the adapter into the weights")
    if (bias := raw.get("bias", "none")) != "none":
        raise ModelError(f"{where} has bias {bias!r}: biases are not supported, so merge the adapter into the weights")
    if str(way := raw.get("init_lora_weights")).lower().startswith(CHANGES_THE_BASE):
        raise ModelError(
            f"{where} was begun as {way!r}, which changed the base's weights too, and this base is unchanged: convert it with "
            "PEFT's save_pretrained(..., path_initial_model_for_weight_conversion=...), or merge it into the weights"
        )
    rank, alpha = positive(raw, "r"), raw.get("lora_alpha", 8)
    if rank > min(rank_max, RANK_MAX):
        raise ModelError(f"{where} has the rank {rank}, more than --max-lora-rank {rank_max}: raise it (at most {RANK_MAX})")
    if isinstance(alpha, bool) or not isinstance(alpha, int | float):
        raise ModelError(f"{where} has lora_alpha {alpha!r}: it must be a number")
    return AdapterSettings(rank, alpha / rank**0.5 if raw.get("use_rslora") else alpha / rank)


def adapter_digest(folder: Path) -> str:
    """A digest of every byte of the adapter's two files, 32 hexadecimal digits. Raises ModelError."""
    digest = blake2b(digest_size=16)
    try:
        for name in (SETTINGS_NAME, WEIGHTS_NAME):
            path = folder / name
            digest.update(path.stat().st_size.to_bytes(8, "little"))
            with path.open("rb") as stream:
                while chunk := stream.read(CHUNK_BYTES):
                    digest.update(chunk)
    except OSError as error:
        raise ModelError(f"the adapter in {folder} cannot be read ({error})") from error
    return digest.hexdigest()
