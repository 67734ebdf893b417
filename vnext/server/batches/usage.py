"""Usage: what the answers of a batch have cost together, as OpenAI's API shows it, and which model gave them.

Owns the names under which each of this server's APIs counts its tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec


class Cached(msgspec.Struct, frozen=True, kw_only=True):
    cached_tokens: int = 0


class Thought(msgspec.Struct, frozen=True, kw_only=True):
    reasoning_tokens: int = 0


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens of all complete answers."""

    input_tokens: int = 0
    input_tokens_details: Cached = Cached()
    output_tokens: int = 0
    output_tokens_details: Thought = Thought()
    total_tokens: int = 0

    def __add__(self, other: Usage) -> Usage:
        cached = self.input_tokens_details.cached_tokens + other.input_tokens_details.cached_tokens
        thought = self.output_tokens_details.reasoning_tokens + other.output_tokens_details.reasoning_tokens
        return Usage(
            input_tokens=self.input_tokens + other.input_tokens,
            input_tokens_details=Cached(cached_tokens=cached),
            output_tokens=self.output_tokens + other.output_tokens,
            output_tokens_details=Thought(reasoning_tokens=thought),
            total_tokens=self.total_tokens + other.total_tokens,
        )


class Spent(NamedTuple):
    """Of some answers: the tokens, and the name of the model."""

    usage: Usage = Usage()
    model: str | None = None


class _Body(msgspec.Struct, frozen=True, kw_only=True):
    """The members of an answer that are read here."""

    model: str | None = None
    usage: dict[str, Any] | None = None


class _Response(msgspec.Struct, frozen=True, kw_only=True):
    body: msgspec.Raw


class _Line(msgspec.Struct, frozen=True, kw_only=True):
    response: _Response


_line_decoder, _body_decoder = msgspec.json.Decoder(_Line), msgspec.json.Decoder(_Body)


def spent_by(body: Any) -> Spent:
    """What one answer has cost; nothing for one that counts no tokens."""
    try:
        found = msgspec.convert(body, _Body)
    except msgspec.ValidationError:
        return Spent()
    return Spent(_usage(found.usage or {}), found.model)


def spent_in(path: Path) -> Spent:
    """What the whole lines of a file of results have cost."""
    usage, model = Usage(), None
    for line in path.read_bytes().splitlines() if path.is_file() else ():
        try:
            found = _body_decoder.decode(_line_decoder.decode(line).response.body)
        except (ValueError, RecursionError):
            continue
        usage, model = usage + _usage(found.usage or {}), model or found.model
    return Spent(usage, model)


def _usage(given: Mapping[str, Any]) -> Usage:
    """Of a chat, a completion or embeddings (prompt and completion), a response, or Anthropic's message (input and output)."""
    anthropic = sum(_count(given, f"cache_{name}_input_tokens") for name in ("creation", "read"))
    read = _count(given, "prompt_tokens") + _count(given, "input_tokens") + anthropic
    written = _count(given, "completion_tokens") + _count(given, "output_tokens")
    cached = _count(given, "cache_read_input_tokens")
    for name in ("prompt_tokens_details", "input_tokens_details"):
        cached += _count(given.get(name), "cached_tokens")
    thought = sum(_count(given.get(f"{name}_tokens_details"), "reasoning_tokens") for name in ("completion", "output"))
    return Usage(
        input_tokens=read,
        input_tokens_details=Cached(cached_tokens=cached),
        output_tokens=written,
        output_tokens_details=Thought(reasoning_tokens=thought),
        total_tokens=read + written,
    )


def _count(members: Any, name: str) -> int:
    found = members.get(name) if isinstance(members, Mapping) else None
    return found if isinstance(found, int) else 0
