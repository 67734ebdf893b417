"""A draft model on a rank: a smaller checkpoint with the target's vocabulary, whole on every rank.

Owns what it must be. Every rank computes the same drafts, because it has the same weights and the same tokens. On a CPU it computes
without torch, which heads need.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from vnext.base.tokenizer_files import VOCABULARY, tokenizer_json
from vnext.models.config.model_config import ModelConfig, load_config
from vnext.models.layers.kv_cache import kv_groups
from vnext.models.layers.sharding import alone
from vnext.runtime.protocol.settings import RankSettings, SettingsError
from vnext.runtime.rank.runner import ModelRunner


def load_draft_model(settings: RankSettings, target: ModelRunner) -> ModelRunner:
    """The draft model that the settings name. Raises ModelError, SettingsError."""
    path = Path(settings.draft_path)
    config = load_config(path)
    if reason := why_no_draft_model(path, config, target.path, target.config, settings.max_model_len):
        raise SettingsError(f"speculative_config names the draft model {path}, {reason}")
    runner = ModelRunner(path, settings.bare, target.device, alone(), config=config)
    require_same_drafts(settings, runner)
    return runner


def require_same_drafts(settings: RankSettings, runner: ModelRunner) -> None:
    """Raise SettingsError where ranks that draft by what `runner` computes may draft differently."""
    if settings.world_size > 1 and not runner.invariance.holds:
        raise SettingsError(
            f"speculative_config asks for method {settings.draft_method}, whose drafts may differ between ranks "
            f"({runner.invariance.why}): take --deterministic, or another method"
        )


def why_no_draft_model(path: Path, draft: ModelConfig, target_path: Path, target: ModelConfig, max_model_len: int | None) -> str:
    """Why a checkpoint cannot draft for another, with the remedy; "" where it can."""
    longest = max_model_len or target.position_count_max
    if draft.vocab_size != target.vocab_size:
        return (
            f"which has a vocabulary of {draft.vocab_size} tokens, and the model has {target.vocab_size}: name one with the "
            "model's tokenizer"
        )
    if vocabulary_of(path) != vocabulary_of(target_path):
        return "whose tokenizer.json gives tokens other numbers than the model's: name one with the model's tokenizer"
    if draft.position_count_max < longest:
        return f"which knows {draft.position_count_max} positions of {longest}: take --max-model-len {draft.position_count_max}"
    if draft.recurrent is not None:
        return "which has recurrent layers: name one whose layers all attend"
    if any((*kv_groups(draft).windows, *kv_groups(target).windows)):
        return "and it or the model has attention windows: name models with full attention, or another method"
    return ""


def vocabulary_of(path: Path) -> Any:
    """The numbers of a checkpoint's tokens; None without a tokenizer.json."""
    if not (path / VOCABULARY).is_file():
        return None
    read = json.loads(tokenizer_json(path))
    added = {each["content"]: each["id"] for each in read.get("added_tokens", ())}
    return read.get("model", {}).get("vocab"), added
