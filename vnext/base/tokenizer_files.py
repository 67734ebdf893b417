"""The files of a checkpoint's tokenizer, read together: the special tokens that only some name, and the one that ends an answer.

tokenizer.json has the vocabulary. added_tokens.json, special_tokens_map.json and tokenizer_config.json may name special tokens that
it lacks, by transformers' rules. Reads JSON only: no tokenizer library is needed, and ranks read no more than they use.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

VOCABULARY, SETTINGS, NAMES, ADDED = "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"
TEMPLATE_FILE, TEMPLATES_FOLDER = "chat_template.jinja", "additional_chat_templates"
CONFIG = "config.json"
BY_ID = "added_tokens_decoder"
LISTS = ("additional_special_tokens", "extra_special_tokens")
Added = list[dict[str, Any]]
"""Tokens as tokenizer.json adds them to its vocabulary."""
FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")
FILLER = "<|reserved_token_{}|>"
"""Transformers' name for a number that no token has."""


POINTER = b"version https://git-lfs.github.com/spec/"
POINTER_BYTES = len(POINTER)


def is_pointer(data: bytes) -> bool:
    """Whether a file that begins so is a pointer of Git LFS in the place of another."""
    return data.startswith(POINTER)


def pointer_sentence(path: Path) -> str:
    return f"{path} is only a pointer of Git LFS to the file: run 'git lfs pull' in its folder, or download the model again"


class Token(NamedTuple):
    """A special token as files name it, with the flags of tokenizer.json; `number` is None where no file gives one."""

    text: str
    number: int | None
    flags: Mapping[str, bool]


class _Model(msgspec.Struct):
    vocab: Any = None


class _Vocabulary(msgspec.Struct):
    """What is read of tokenizer.json where tokens are missing there."""

    model: _Model
    added_tokens: Added = []


class _AddedTokens(msgspec.Struct):
    added_tokens: Added = []


_added_decoder, _vocabulary_decoder = msgspec.json.Decoder(_AddedTokens), msgspec.json.Decoder(_Vocabulary)


def tokenizer_settings(folder: Path) -> dict[str, Any]:
    """tokenizer_config.json with what special_tokens_map.json adds; an older file of the first kind gives way to it. Raises OSError
    and ValueError, one sentence."""
    settings, names = _object(folder / SETTINGS), _object(folder / NAMES)
    return names | settings if BY_ID in settings else settings | names


def named_tokens(settings: Mapping[str, Any]) -> dict[str, str]:
    """bos_token, eos_token and their like, as text; each is written as a string or as an object with `content`."""
    found = {name: _text(value) for name, value in settings.items() if name.endswith("_token")}
    extra = settings.get(LISTS[1])
    found |= {name: _text(value) for name, value in extra.items()} if isinstance(extra, dict) else {}
    return {name: text for name, text in found.items() if text is not None}


def template_names(folder: Path) -> set[str]:
    """The names of the chat templates of tokenizer_config.json, and of those with files of their own."""
    try:
        found = tokenizer_settings(folder).get("chat_template")
    except (OSError, ValueError):  # who needs a tokenizer says what is wrong with it
        return set()
    listed = [each.get("name") for each in found if isinstance(each, dict)] if isinstance(found, list) else []
    named = found if isinstance(found, dict) else listed
    return {str(name) for name in named} | {file.stem for file in (folder / TEMPLATES_FOLDER).glob("*.jinja")}


def written_template(folder: Path) -> str:
    """The source of the chat template that has no name; "" where no file has one, or none can be read."""
    try:
        if (folder / TEMPLATE_FILE).is_file():
            return (folder / TEMPLATE_FILE).read_text(encoding="utf-8")
        found = tokenizer_settings(folder).get("chat_template")
    except (OSError, ValueError):  # who needs a template says what is wrong with it
        return ""
    return found if isinstance(found, str) else ""


def vocabulary_numbers(folder: Path, words: Sequence[str]) -> list[int | None]:
    """The numbers of tokens by their texts in tokenizer.json; None for one that it lacks, or where it cannot be read."""
    try:
        data, added = _whole(folder)
        known = {each.get("content"): each.get("id") for each in added}
        if not known.keys() >= {*words}:  # a whole vocabulary takes long to read
            known = _numbers(_vocabulary_decoder.decode(data).model.vocab) | known
    except (OSError, ValueError):  # who needs a tokenizer says what is wrong with it
        return [None] * len(words)
    return [number if isinstance(number := known.get(word), int) else None for word in words]


def tokenizer_json(folder: Path) -> bytes:
    """tokenizer.json with the special tokens that only other files name. Raises OSError and ValueError, one sentence."""
    return _whole(folder)[0]


def _whole(folder: Path) -> tuple[bytes, Added]:
    """`tokenizer_json`, and its added tokens."""
    if is_pointer(data := (folder / VOCABULARY).read_bytes()):
        raise ValueError(pointer_sentence(folder / VOCABULARY))
    added = _added_decoder.decode(data).added_tokens
    known = {each.get("content") for each in added}
    missing = [token for token in _tokens(folder) if token.text not in known]
    if not missing:
        return data, added
    entries = list(_entries(_vocabulary_decoder.decode(data), missing, _width(folder)))
    whole = json.loads(data)
    whole["added_tokens"] = added = [*whole.get("added_tokens", ()), *entries]
    return json.dumps(whole, ensure_ascii=False).encode(), added


def vocabulary(data: bytes) -> dict[str, int]:
    """The tokens of the model in tokenizer.json, without those added to it."""
    return _numbers(_vocabulary_decoder.decode(data).model.vocab)


def special_token(folder: Path, role: str = "eos_token") -> int | None:
    """The number of the tokenizer's token of a role; None where its files name none that it has, or cannot be read. Files that are
    as they were are not read again: a large vocabulary takes as long as the weights of a small model."""
    return _special_token(folder, role, tuple(file_state(folder / name) for name in (VOCABULARY, SETTINGS, NAMES, ADDED, CONFIG)))


def file_state(file: Path) -> tuple[int, ...]:
    """What tells a file from what it was before, () where there is none."""
    try:
        found = file.stat()
    except OSError:
        return ()
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns


@lru_cache(maxsize=64)
def _special_token(folder: Path, role: str, states: tuple[tuple[int, ...], ...]) -> int | None:
    try:
        text = named_tokens(tokenizer_settings(folder)).get(role)
    except (OSError, ValueError):  # who needs a tokenizer says what is wrong with it
        return None
    return None if text is None else vocabulary_numbers(folder, [text])[0]


def _tokens(folder: Path) -> Iterator[Token]:
    """All tokens that files beside tokenizer.json name, each once: those with numbers first, rising."""
    settings = tokenizer_settings(folder)
    texts = [*named_tokens(settings).values(), *_listed(settings)]
    seen = set()
    for token in (*_numbered(folder, settings, texts), *(Token(text, None, _flags(special=True)) for text in texts)):
        if token.text and token.text not in seen:
            seen.add(token.text)
            yield token


def _numbered(folder: Path, settings: Mapping[str, Any], special: list[str]) -> list[Token]:
    """The tokens of added_tokens_decoder, else of added_tokens.json, whose special ones others name."""
    try:
        if BY_ID in settings:
            found = [Token(each["content"], int(number), _flags(**each)) for number, each in settings[BY_ID].items()]
        else:
            added = _object(folder / ADDED).items()
            found = [Token(text, number, _flags(special=text in special)) for text, number in added if isinstance(number, int)]
    except (LookupError, TypeError, AttributeError) as error:
        raise ValueError(f"{folder / SETTINGS} has {BY_ID} that is no object of tokens") from error
    return sorted(found, key=lambda token: token.number or 0)


def _entries(vocabulary: _Vocabulary, missing: list[Token], width: int | None) -> Iterator[dict[str, Any]]:
    """The missing tokens as tokenizer.json has them, with the numbers that readers give them, and fillers where there are gaps.

    `width`: tokens that the model knows, None for any number.
    """
    numbers = _numbers(vocabulary.model.vocab)
    free = max([len(numbers) - 1, *(each["id"] for each in vocabulary.added_tokens)]) + 1
    for token in missing:
        number = numbers.get(token.text, free if token.number is None else token.number)
        if token.text not in numbers and number < free:
            raise ValueError(f"another file gives {token.text!r} the number {number}, which is taken here: correct one of the two")
        if token.number is None and width is not None and number >= width:
            continue  # the model has no such token
        if number >= free:
            yield from (_entry(Token(FILLER.format(gap), gap, _flags(special=True))) for gap in range(free, number))
            free = number + 1
        yield _entry(token._replace(number=number))


def _entry(token: Token) -> dict[str, Any]:
    return {"id": token.number, "content": token.text, **token.flags}


def _flags(**given: Any) -> dict[str, bool]:
    """The flags of a token; one that is not special is normalized where nothing else is said."""
    usual = {"normalized": not given.get("special", False)}
    return {name: bool((usual | given).get(name, False)) for name in FLAGS}


def _listed(settings: Mapping[str, Any]) -> list[str]:
    values = [value for name in LISTS if isinstance(listed := settings.get(name), list) for value in listed]
    return [text for value in values if (text := _text(value)) is not None]


def _text(value: Any) -> str | None:
    content = value.get("content") if isinstance(value, dict) else value
    return content if isinstance(content, str) else None


def _numbers(vocab: Any) -> dict[str, int]:
    """The vocabulary of a tokenizer's model: an object, or pairs with a score in the order of their numbers."""
    if isinstance(vocab, dict):
        return vocab
    return {pair[0]: number for number, pair in enumerate(vocab)} if isinstance(vocab, list) else {}


def _width(folder: Path) -> int | None:
    config = _object(folder / CONFIG)
    text = config.get("text_config")
    found = config.get("vocab_size") or (text.get("vocab_size") if isinstance(text, dict) else None)
    return found if isinstance(found, int) else None


def _object(path: Path) -> dict[str, Any]:
    """A file's JSON object, {} where there is no file."""
    if not path.is_file():
        return {}
    if is_pointer(data := path.read_bytes()):
        raise ValueError(f"{pointer_sentence(path)}.")
    try:
        return msgspec.json.decode(data, type=dict[str, Any])
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is no JSON object: {error}.") from error
