"""Pooling: how the states of a text's tokens become its vector, by the files that sentence-transformers writes beside config.json.

Owns their names. A folder without modules.json says nothing of it.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from vnext.models.config.json_keys import Json, read_optional_json
from vnext.models.errors import ModelError

MODULES, LENGTHS, SETTINGS = "modules.json", "sentence_bert_config.json", "config.json"
MODES = {"cls_token": "cls", "mean_tokens": "mean", "max_tokens": "max", "lasttoken": "last"}
"""What follows pooling_mode_ in a file, and the names that requests have for it."""
NAMES = {"cls": "cls", "mean": "mean", "max": "max", "lasttoken": "last"}
"""The same, of files that name one."""
REMEDY = "leave modules.json out and name a pooling in each request"


class Pooling(msgspec.Struct, frozen=True, kw_only=True):
    """The vector of a text that a request gets where it names no other: `kind` is one of state.params.POOLINGS; `normalize`: its
    length is 1. `length_max`: tokens of a text, 0 where no file says so."""

    kind: str = "last"
    normalize: bool = True
    length_max: int = 0


def pooling_in(path: Path) -> Pooling | None:
    """That of the checkpoint in folder `path`; None where it has no modules.json. Raises ModelError."""
    if not (path / MODULES).is_file():
        return None
    try:
        modules = msgspec.json.decode((path / MODULES).read_bytes(), type=list[dict[str, object]])
        kinds = {str(module["type"]).rpartition(".")[2]: path / str(module["path"]) for module in modules}
    except (ValueError, RecursionError, KeyError) as error:
        raise ModelError(f"{path / MODULES} is no list of modules ({error}); download the model again") from error
    if others := kinds.keys() - {"Transformer", "Pooling", "Normalize"}:
        raise ModelError(f"modules.json names {min(others)}, which is not supported: {REMEDY}")
    if "Pooling" not in kinds:
        raise ModelError(f"modules.json names no Pooling: {REMEDY}")
    longest = read_optional_json(path / LENGTHS).get("max_seq_length")
    return Pooling(
        kind=kind_of(read_optional_json(kinds["Pooling"] / SETTINGS)),
        normalize="Normalize" in kinds,
        length_max=longest if isinstance(longest, int) else 0,
    )


def kind_of(raw: Json) -> str:
    """The pooling of a Pooling module's config.json. Raises ModelError."""
    named = raw.get("pooling_mode")
    chosen = [key.removeprefix("pooling_mode_") for key, value in raw.items() if key.startswith("pooling_mode_") and value is True]
    found = NAMES.get(str(named)) if named else MODES.get(chosen[0]) if len(chosen) == 1 else None
    if found is None:
        raise ModelError(f"a pooling of {named or chosen or 'no mode'} is not supported: {REMEDY}")
    return found
