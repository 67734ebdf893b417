"""The setting `speculative_config`: a JSON object with vLLM's names, and what it means to the engine."""

from __future__ import annotations

import json
from typing import Any

import msgspec

from vnext.runtime.protocol.settings import SettingsError
from vnext.state.config import DRAFTERS, MEASURED, Speculation
from vnext.state.params import SPECULATIVE_TOKENS_MAX

WITH_MODEL = ("draft_model", "eagle3")
WITH_LAYERS = (*WITH_MODEL, "mtp")
"""Methods that compute with a model, or beside one."""
ALIASES = {"[ngram]": "ngram", "prompt_lookup": "ngram", "mimo_mtp": "mtp", "deepseek_mtp": "mtp"}
FIELDS = tuple(field.name for field in msgspec.structs.fields(Speculation))
BOUNDS = {
    "num_speculative_tokens": (1, SPECULATIVE_TOKENS_MAX), "prompt_lookup_min": (1, 64), "prompt_lookup_max": (1, 64),
    "row_cost": (0, 1000), "step_cost": (0, 1000), "row_cost_many": (0, 1000), "suffix_decoding_max_tree_depth": (1, 1024),
    "suffix_decoding_max_spec_factor": (0, 64), "suffix_decoding_min_token_prob": (0, 1),
    "suffix_decoding_max_cached_requests": (0, 1_000_000),
}  # fmt: skip


def speculation_of(text: str) -> Speculation | None:
    """The speculation that a JSON object asks for; None for "". Raises SettingsError."""
    if not text:
        return None
    given: dict[str, Any] = json.loads(text)
    if unknown := sorted(given.keys() - set(FIELDS)):
        raise SettingsError(f"speculative_config has {unknown[0]!r}: it may have {', '.join(FIELDS)}.")
    method = given.get("method", "draft_model" if "model" in given else "ngram")
    method = ALIASES.get(method, method) if isinstance(method, str) else method
    if method not in DRAFTERS:
        raise SettingsError(f"speculative_config asks for the method {method!r}: it must be one of {', '.join(DRAFTERS)}.")
    try:
        found = msgspec.convert({"row_cost": MEASURED} | given | {"method": method}, Speculation)
    except msgspec.ValidationError as error:
        raise SettingsError(f"speculative_config is {text}: {error}.") from error
    if (found.method in WITH_MODEL) != bool(found.model):
        which = f"{' or '.join(WITH_MODEL)}, and {'no model' if not found.model else f'method {found.method}'} is given"
        raise SettingsError(f"speculative_config takes a model with method {which}: give both or neither.")
    _check_numbers(found)
    return found


def _check_numbers(found: Speculation) -> None:
    for name, (low, high) in BOUNDS.items():
        if name == "row_cost" and found.row_cost == MEASURED:
            continue
        if not low <= getattr(found, name) <= high:
            raise SettingsError(f"speculative_config has {name} {getattr(found, name)}: it must lie between {low} and {high}.")
    if found.prompt_lookup_min > found.prompt_lookup_max:
        raise SettingsError(
            f"speculative_config has prompt_lookup_min {found.prompt_lookup_min}, more than prompt_lookup_max "
            f"{found.prompt_lookup_max}: swap the two."
        )
