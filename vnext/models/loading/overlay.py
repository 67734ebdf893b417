"""Overlay: a checkpoint's folder with some of its files replaced, as a folder of its own made of links.

Owns what --hf-overrides, --override-generation-config, --tokenizer and --load-format dummy mean, and the folder that shows a GGUF
file as a checkpoint: everything that reads a checkpoint reads such a folder, and nothing else knows of these options. An overlay's
name is the hash of what it holds, so that equal overrides share one, and a log that names it can be executed again.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import secrets
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from vnext.base.spelling import reason
from vnext.base.tokenizer_files import TEMPLATES_FOLDER
from vnext.models.config.folder import CONFIG_NAME, DUMMY_NAME, INDEX_NAME, OVERRIDDEN
from vnext.models.config.json_keys import read_json, read_optional_json
from vnext.models.errors import ModelError
from vnext.models.gguf.folder import FORM, LINK, LINKS, files_of, plain_name, texts_of
from vnext.models.gguf.towers import PIXELS, tower_beside

GENERATION_NAME = "generation_config.json"
TOKENIZER_NAMES = (
    "tokenizer.json", "tokenizer_config.json", "tokenizer.model", "special_tokens_map.json", "added_tokens.json",
    "chat_template.jinja", "chat_template.json", TEMPLATES_FOLDER, "vocab.json", "merges.txt",
)  # fmt: skip
VOCABULARIES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model", "tekken.json")
DUMMY_GENERATOR = 1
"""Of the numbers of dummy weights (checkpoint.py): it changes when they do."""
_HELD: dict[Path, int] = {}
"""An open descriptor of each folder that this process holds."""
ROPE_KEYS = ("rope_theta", "rope_scaling", "rope_local_base_freq", "rope_parameters")


class Overrides(NamedTuple):
    """What replaces a checkpoint's own: members of config.json and of generation_config.json, and the folder of a tokenizer.
    Without `keeps_generation` the members of generation_config.json stand alone. `is_dummy`: random numbers replace the weights."""

    config: dict[str, Any]
    generation: dict[str, Any]
    keeps_generation: bool = True
    tokenizer: Path | None = None
    is_dummy: bool = False


def overlay(folder: Path, overrides: Overrides, parent: Path) -> Path:
    """The folder in `parent` that shows the checkpoint `folder` with `overrides`; `folder` itself where there are none.
    Raises ModelError."""
    if not (overrides.config or overrides.generation or overrides.tokenizer or overrides.is_dummy or lacks_tokenizer(folder)):
        return folder
    folder = folder.resolve()
    texts = _texts(folder, overrides)
    shown = (path for path in folder.iterdir() if (path.is_file() or path.name == TEMPLATES_FOLDER) and path.name not in texts)
    links = {path.name: path.resolve() for path in shown}
    if overrides.tokenizer is not None:
        theirs = {path.name: path.resolve() for path in overrides.tokenizer.iterdir() if path.name in TOKENIZER_NAMES}
        links = {name: path for name, path in links.items() if name not in TOKENIZER_NAMES} | theirs
    if overrides.is_dummy:
        links = {name: path for name, path in links.items() if not name.endswith(".safetensors") and name != INDEX_NAME}
    contents = json.dumps([texts, sorted((name, str(path)) for name, path in links.items())], sort_keys=True)
    found = parent / hashlib.blake2b(contents.encode(), digest_size=8).hexdigest() / folder.name
    if not found.is_dir():
        _make(found, texts, links, "overrides")
        _clear(parent, lambda made: not all(link.exists() for link in made.glob("*/*")))
    return found


def gguf_folder(file: Path, parent: Path, own: Path | None = None) -> Path:
    """The folder in `parent` that shows the model of a GGUF file, with the tower `own`, or that beside it, and with what a
    generation_config.json says beside it. Its name follows from the files' places, sizes and times: a start that finds it reads no
    header. Raises ModelError, too for a tower `own` that is not the model's."""
    if own and not own.is_file():
        raise ModelError(f"there is no file {own}: give --mmproj the tower's GGUF file")
    file = file.absolute()
    tower = own or tower_beside(file)  # links of the hub's cache lead to names without an ending
    files = files_of(file) + ([tower] if tower else [])
    beside = files[0].with_name(GENERATION_NAME)
    found = parent / _gguf_digest(files) / plain_name(file)
    if not found.is_dir():
        written = _texts_of(files, beside)
        texts = {name: json.dumps(value, ensure_ascii=False, separators=(",", ":")) for name, value in written.items()}
        _make(found, texts, {LINK.format(number): each for number, each in enumerate(files, 1)}, file.name)
        _clear(parent, _is_replaced)
    if own and not (found / PIXELS).is_file():
        raise ModelError(f"{own} is not the tower of {file.name}, or of a kind not read: give --mmproj another, or leave it out")
    return found


def _gguf_digest(files: list[Path]) -> str:
    """Of what a GGUF file's folder is made of. Raises OSError where a file is gone."""
    beside = files[0].with_name(GENERATION_NAME)
    stats = [(str(each), each.stat().st_size, each.stat().st_mtime_ns) for each in [*files, *[beside] * beside.is_file()]]
    return hashlib.blake2b(json.dumps([FORM, stats]).encode(), digest_size=8).hexdigest()


def _is_replaced(made: Path) -> bool:
    """Whether the GGUF files of a folder are gone, or are others now."""
    try:
        return made.name != _gguf_digest([link.readlink() for link in sorted(made.glob(f"*/{LINKS}"))])
    except (OSError, IndexError):
        return True


def hold(made: Path) -> None:
    """While this process lives no start removes the folder `made` of this module, whatever becomes of its files: an engine that
    ends is started again from there."""
    if made.parent not in _HELD:
        with suppress(OSError):
            _HELD[made.parent] = descriptor = os.open(made.parent, os.O_RDONLY)
            fcntl.flock(descriptor, fcntl.LOCK_SH)


def _is_held(made: Path) -> bool:
    """Whether a process holds such a folder."""
    descriptor = os.open(made, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(descriptor)
    return False


def _clear(parent: Path, is_stale: Callable[[Path], bool]) -> None:
    """Remove the folders in `parent` for which no start will ask again and that none holds. Those being made have a dot."""
    for made in parent.iterdir():
        if "." not in made.name and is_stale(made) and not _is_held(made):
            shutil.rmtree(made, ignore_errors=True)


def _texts_of(files: list[Path], beside: Path) -> dict[str, dict[str, object]]:
    texts = texts_of(files)
    return texts | {GENERATION_NAME: merged(texts[GENERATION_NAME], read_optional_json(beside))}


def merged(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    """`base` with the members of `over`, objects member by member."""
    both = (key for key in base.keys() & over.keys() if isinstance(base[key], dict) and isinstance(over[key], dict))
    return base | over | {key: merged(base[key], over[key]) for key in both}


def overridden(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    """config.json with the members of `over`, which count wherever `base` says the same: in its language part, and under the newer
    name of a rope's settings."""
    found = merged(base, over)
    if isinstance(text := base.get("text_config"), dict):
        within = {key: value for key, value in over.items() if key != "text_config" and (key in text or key in ROPE_KEYS)}
        inner = merged(overridden(text, within), over.get("text_config") or {})
        return found | {"text_config": inner}
    parameters = base.get("rope_parameters")
    if not isinstance(parameters, dict) or not parameters:
        return found
    if "full_attention" in parameters or "sliding_attention" in parameters:
        kinds = (("full_attention", "rope_theta", "rope_scaling"), ("sliding_attention", "rope_local_base_freq", ""))
        ropes = {kind: _rope(parameters.get(kind) or {}, over, theta, scaling) for kind, theta, scaling in kinds}
    else:
        ropes = _rope(parameters, over, "rope_theta", "rope_scaling")
    return found | {"rope_parameters": merged(ropes, over.get("rope_parameters") or {})}


def _rope(rope: dict[str, Any], over: dict[str, Any], theta: str, scaling: str) -> dict[str, Any]:
    """One rope's settings with what `over` says of it under the older names. A scaling replaces another wholly."""
    if scaling in over:
        kept = {key: rope[key] for key in ("rope_theta", "partial_rotary_factor") if key in rope}
        rope = kept | (over[scaling] or {})
    return rope | ({"rope_theta": over[theta]} if theta in over else {})


def _texts(folder: Path, overrides: Overrides) -> dict[str, str]:
    """The files that are written anew."""
    found = {}
    if overrides.config:
        found[CONFIG_NAME] = overridden(read_json(folder / CONFIG_NAME), overrides.config)
    if overrides.generation:
        base = read_optional_json(folder / GENERATION_NAME) if overrides.keeps_generation else {}
        found[GENERATION_NAME] = merged(base, overrides.generation) | {OVERRIDDEN: sorted(overrides.generation)}
    if overrides.is_dummy:
        found[DUMMY_NAME] = {"generator": DUMMY_GENERATOR}
        if overrides.tokenizer is None and not (folder / "tokenizer.json").is_file():
            found["tokenizer.json"] = _byte_tokenizer()
    elif overrides.tokenizer is None and lacks_tokenizer(folder):
        found["tokenizer.json"] = _number_tokenizer(found.get(CONFIG_NAME) or read_json(folder / CONFIG_NAME))
    return {name: json.dumps(value, indent=2) for name, value in found.items()}


def lacks_tokenizer(folder: Path) -> bool:
    """Whether a checkpoint has no tokenizer in any form: then it is served by token ids."""
    return (folder / CONFIG_NAME).is_file() and not any((folder / name).is_file() for name in VOCABULARIES)


def _number_tokenizer(config: dict[str, Any]) -> dict[str, Any]:
    """A tokenizer.json for a checkpoint that has none: a text is token ids, decimal numbers between blanks. Raises ModelError."""
    inner = config.get("text_config")
    size = (inner if isinstance(inner, dict) else config).get("vocab_size")
    if not isinstance(size, int):
        raise ModelError("the model has neither a tokenizer nor a vocab_size in config.json; give --tokenizer a folder with one")
    words = {"type": "Metaspace", "replacement": "\u2581", "prepend_scheme": "always", "split": True}
    model = {"type": "WordLevel", "vocab": {f"\u2581{number}": number for number in range(size)}, "unk_token": ""}
    return {"version": "1.0", "added_tokens": [], "pre_tokenizer": words, "decoder": words, "model": model}


def _byte_tokenizer() -> dict[str, Any]:
    """A tokenizer.json for a configuration that has none: a token is a byte, and tokens from number 256 on have no text."""
    shown = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}  # the others have letters from 256 on, as in GPT-2
    hidden = iter(range(256, 512))
    vocabulary = {chr(byte if byte in shown else next(hidden)): byte for byte in range(256)}
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    model = {"type": "BPE", "vocab": vocabulary, "merges": []}
    return {"version": "1.0", "added_tokens": [], "pre_tokenizer": level, "decoder": level, "model": model}


def _make(found: Path, texts: dict[str, str], links: dict[str, Path], purpose: str) -> None:
    """Make the folder `found` for this purpose. Raises ModelError."""
    try:
        _make_once(found, texts, links)
    except OSError as error:
        raise ModelError(f"the folder {found} for {purpose} cannot be made ({reason(error)}); make room for it") from error


def _make_once(found: Path, texts: dict[str, str], links: dict[str, Path]) -> None:
    """Make the folder under a name of its own first: another start may be making the same one."""
    draft = found.parent.with_name(f"{found.parent.name}.{secrets.token_hex(4)}")
    inner = draft / found.name
    inner.mkdir(parents=True)
    for name, text in texts.items():
        (inner / name).write_text(text, encoding="utf-8")
    for name, path in links.items():
        (inner / name).symlink_to(path)
    try:
        os.rename(draft, found.parent)
    except OSError:
        shutil.rmtree(draft)
        if not found.is_dir():
            raise
