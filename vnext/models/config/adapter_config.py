"""The folder of a LoRA adapter as PEFT writes it: adapter_config.json and adapter_model.safetensors.

Owns what vnext reads of the configuration, what it refuses, and the digest by which an adapter is known. Needs no torch.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from hashlib import blake2b
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from vnext.base.spelling import reason
from vnext.models.config.json_keys import Json, positive, read_json, shown
from vnext.models.errors import ModelError

SETTINGS_NAME, WEIGHTS_NAME = "adapter_config.json", "adapter_model.safetensors"
RANK_MAX = 256
CHUNK_BYTES = 1 << 20
PATTERN_MAX = 400
REPEATS_MAX = 2
_REPEAT, _COSTLY = re.compile(r"[*+{]"), re.compile(r"\)[*+{]|\(\?")
"""Of patterns: what repeats, and what may take long to match, because it repeats a group or looks ahead."""
REFUSED = MappingProxyType(
    {
        "use_dora": "weights that are decomposed (DoRA)",
        "modules_to_save": "whole modules beside the adapter",
        "lora_bias": "biases",
        "layer_replication": "layers used twice",
        "trainable_token_indices": "new embeddings of tokens",
        "target_parameters": "parameters that are no linear layer",
        "use_qalora": "QALoRA",
        "alora_invocation_tokens": "tokens that switch the adapter on",
        "arrow_config": "routing between adapters",
        "corda_config": "a base that was changed for it",
        "use_bdlora": "blocks on the diagonal (BD-LoRA)",
    }
)
"""Member of adapter_config.json -> what it asks for."""
READ = frozenset(
    """
    alora_invocation_tokens alpha_pattern arrow_config auto_mapping base_model_name_or_path bias corda_config ensure_weight_tying
    eva_config exclude_modules fan_in_fan_out inference_mode init_lora_weights layer_replication layers_pattern layers_to_transform
    loftq_config lora_alpha lora_bias lora_dropout megatron_config megatron_core modules_to_save peft_type peft_version
    qalora_group_size r rank_pattern revision runtime_config target_modules target_parameters task_type trainable_token_indices
    use_bdlora use_dora use_qalora use_rslora
    """.split()
)
"""Members of adapter_config.json that are read, or whose work is done when an adapter is saved."""
CHANGES_THE_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")
"""Ways of beginning an adapter (init_lora_weights) that take something out of the base's weights."""


class AdapterSettings(NamedTuple):
    """What an adapter's product is: `scale_of` a module times up times down, both of `rank_of` it. `ranks`, `alphas`: those of the
    modules whose names match a pattern, where the first one counts. `is_rooted`: the scale goes by the rank's root (rsLoRA).
    `unread`: members of the file that say something and are not known here."""

    rank: int
    alpha: float
    is_rooted: bool
    ranks: tuple[tuple[re.Pattern[str], int], ...] = ()
    alphas: tuple[tuple[re.Pattern[str], float], ...] = ()
    unread: tuple[str, ...] = ()

    def rank_of(self, module: str) -> int:
        """By the module's name in the adapter."""
        return next((rank for pattern, rank in self.ranks if pattern.match(module)), self.rank)

    def scale_of(self, module: str) -> float:
        """By the module's name in the adapter."""
        alpha, rank = next((alpha for pattern, alpha in self.alphas if pattern.match(module)), self.alpha), self.rank_of(module)
        return alpha / rank**0.5 if self.is_rooted else alpha / rank


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
    settings = AdapterSettings(
        rank=positive(raw, "r"),
        alpha=_scale(where, "lora_alpha", raw.get("lora_alpha", 8)),
        is_rooted=bool(raw.get("use_rslora")),
        ranks=tuple((key, positive({name: rank}, name)) for key, name, rank in _patterns(where, raw, "rank_pattern")),
        alphas=tuple((key, _scale(where, name, alpha)) for key, name, alpha in _patterns(where, raw, "alpha_pattern")),
        unread=tuple(sorted(name for name in raw.keys() - READ if raw[name] not in (None, False, "", [], {}))),
    )
    if (rank := max([settings.rank, *(each for _, each in settings.ranks)])) > min(rank_max, RANK_MAX):
        raise ModelError(f"{where} has the rank {rank}, more than --max-lora-rank {rank_max}: raise it (at most {RANK_MAX})")
    return settings


def _scale(where: str, name: str, alpha: Any) -> float:
    if isinstance(alpha, bool) or not isinstance(alpha, int | float):
        raise ModelError(f"{where} has {name} {alpha!r}: it must be a number")
    return alpha


def _patterns(where: str, raw: Json, member: str) -> Iterator[tuple[re.Pattern[str], str, Any]]:
    """The patterns of a member, each with a name for errors and its value. As in PEFT: a module's name ends with what matches."""
    found = raw.get(member) or {}
    if not isinstance(found, dict):
        raise ModelError(f"{where} has {member} {shown(found)}: it must be an object")
    for key, value in found.items():
        if len(key) > PATTERN_MAX or _COSTLY.search(key) or len(_REPEAT.findall(key)) > REPEATS_MAX:
            raise ModelError(f"{where} has the pattern {shown(key)} in {member}, which takes too long to match: write it simpler")
        try:
            yield re.compile(rf"(.*\.)?({key})$"), f"{member} of {key!r}", value
        except re.error as error:
            raise ModelError(f"{where} has the pattern {shown(key)} in {member}, which is none ({error})") from error


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
        raise ModelError(f"the adapter in {folder} cannot be read ({reason(error)})") from error
    return digest.hexdigest()
