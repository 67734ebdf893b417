"""The index of weights that lie in several files: the file of each tensor, as in a checkpoint's index, but with whole paths."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from vnext.base.spelling import reason
from vnext.models.errors import ModelError

INDEX_SUFFIX = ".index.json"


def index_of(path: Path) -> dict[str, Path]:
    """The file of each tensor, by name; {} for a path that is no index. Raises ModelError."""
    if not path.name.endswith(INDEX_SUFFIX):
        return {}
    try:
        return {name: Path(file) for name, file in json.loads(path.read_bytes())["weight_map"].items()}
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise ModelError(f"{path} is no index of weights ({reason(error)})") from error


def write_index(path: Path, files: Mapping[str, Path]) -> None:
    """Write the index of these files. Raises OSError."""
    path.write_text(json.dumps({"weight_map": {name: str(file) for name, file in files.items()}}))
