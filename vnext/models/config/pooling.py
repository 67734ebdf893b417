"""Pooling: how the states of a text's tokens become its vector, by the files that sentence-transformers writes beside config.json.

Owns their names. A folder without modules.json says nothing of it, but where config.json names a head that scores pairs, or a chat
template writes pairs, as those of Qwen3-Reranker do.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from vnext.models.config.json_keys import Json, read_optional_json
from vnext.models.config.tail import SETTINGS, WEIGHTS, Scorer, TailLayer, classifier_in, dense_in, judge_in, logit_score_in
from vnext.models.errors import ModelError

MODULES, LENGTHS = "modules.json", "sentence_bert_config.json"
MODES = {"cls_token": "cls", "mean_tokens": "mean", "max_tokens": "max", "lasttoken": "last"}
"""What follows pooling_mode_ in a file, and the names that requests have for it."""
NAMES = {"cls": "cls", "mean": "mean", "max": "max", "lasttoken": "last"}
"""The same, of files that name one."""
ORDER = ("Transformer", "Pooling", "Dense", "Normalize")
"""The modules in the order in which they may stand. LogitScore stands by itself behind the first."""
TOGETHER, WRITTEN = "pairs", "written pairs"
"""The tokenizer joins the two texts of a pair, or the chat template writes them."""
REMEDY = "leave modules.json out and name a pooling in each request"


class Pooling(msgspec.Struct, frozen=True, kw_only=True):
    """The vector of a text that a request gets where it names no other: `kind` is one of state.params.POOLINGS; `normalize`: its
    length is 1. `length_max`: tokens of a text, 0 where no file says so. `layers`: what the vector goes through. `scores`: of a
    model that scores two texts which it reads together, TOGETHER or WRITTEN."""

    kind: str = "last"
    normalize: bool = True
    length_max: int = 0
    layers: tuple[TailLayer, ...] = ()
    scores: str = ""


def pooling_in(path: Path, raw: Json) -> Pooling | None:
    """That of the checkpoint in folder `path`, whose config.json is `raw`; None where no file says any. Raises ModelError."""
    scorer = classifier_in(raw)
    if not (path / MODULES).is_file():
        scorer = scorer or judge_in(path, raw)
        return scored(scorer, path) if scorer else None
    named = modules_in(path)
    kinds, order = dict(named), [kind for kind, _ in named]
    if others := kinds.keys() - {"Transformer", "Pooling", "Dense", "Normalize", "LogitScore"}:
        raise ModelError(f"modules.json names {min(others)}, which is not supported: {REMEDY}")
    if order == ["Transformer", "LogitScore"]:
        return scored(logit_score_in(path, kinds["LogitScore"], raw), path)
    if order == ["Transformer"] and scorer:
        return scored(scorer, path)
    if "Pooling" not in kinds:
        raise ModelError(f"modules.json names no Pooling: {REMEDY}")
    if order != sorted(order, key=ORDER.index):
        raise ModelError(f"modules.json has the modules {', '.join(order)}, and only {', '.join(ORDER)} are supported: {REMEDY}")
    return Pooling(
        kind=kind_of(read_optional_json(kinds["Pooling"] / SETTINGS)),
        normalize="Normalize" in kinds,
        length_max=longest_in(path),
        layers=tuple(dense_in(path, folder) for kind, folder in named if kind == "Dense"),
    )


def modules_in(path: Path) -> list[tuple[str, Path]]:
    """The kinds and folders of modules.json in folder `path`; none without the file. Raises ModelError."""
    if not (path / MODULES).is_file():
        return []
    try:
        modules = msgspec.json.decode((path / MODULES).read_bytes(), type=list[dict[str, object]])
        return [(str(module["type"]).rpartition(".")[2], path / str(module["path"])) for module in modules]
    except (ValueError, RecursionError, KeyError) as error:
        raise ModelError(f"{path / MODULES} is no list of modules ({error}); download the model again") from error


def tail_files(path: Path) -> list[Path]:
    """What the modules behind the pooling are read from, in their order. Raises ModelError."""
    folders = [folder for kind, folder in modules_in(path) if kind in ("Dense", "LogitScore")]
    return [file for folder in folders for file in (folder / SETTINGS, folder / WEIGHTS) if file.is_file()]


def scored(scorer: Scorer, path: Path) -> Pooling:
    """The pooling of a model that scores pairs."""
    scores = WRITTEN if scorer.is_written else TOGETHER
    return Pooling(kind=scorer.kind, normalize=False, length_max=longest_in(path), layers=scorer.layers, scores=scores)


def longest_in(path: Path) -> int:
    """The tokens of a text, by the files in folder `path`; 0 where none says so."""
    longest = read_optional_json(path / LENGTHS).get("max_seq_length")
    return longest if isinstance(longest, int) else 0


def kind_of(raw: Json) -> str:
    """The pooling of a Pooling module's config.json. Raises ModelError."""
    named = raw.get("pooling_mode")
    chosen = [key.removeprefix("pooling_mode_") for key, value in raw.items() if key.startswith("pooling_mode_") and value is True]
    found = NAMES.get(str(named)) if named else MODES.get(chosen[0]) if len(chosen) == 1 else None
    if found is None:
        raise ModelError(f"a pooling of {named or chosen or 'no mode'} is not supported: {REMEDY}")
    return found
