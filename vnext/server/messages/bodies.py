"""Bodies of Anthropic's Messages API as typed structs. `fields` decides about fields that are not named here."""

from __future__ import annotations

from typing import Any

import msgspec


class CacheControl(msgspec.Struct, frozen=True, kw_only=True):
    """`ttl` is "5m" or "1h"."""

    type: str
    ttl: str | None = None


class Block(msgspec.Struct, frozen=True, kw_only=True):
    """A content block of any type; `translation` checks the members of each type. Other members change nothing here."""

    type: str
    text: str | None = None
    id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None
    tool_use_id: str | None = None
    content: str | list[Block] | dict[str, Any] | None = None
    source: str | dict[str, Any] | None = None
    title: str | None = None
    context: str | None = None
    is_error: bool | None = None
    thinking: str | None = None
    cache_control: CacheControl | None = None


class Message(msgspec.Struct, frozen=True, kw_only=True):
    role: str
    content: str | list[Block]


class Tool(msgspec.Struct, frozen=True, kw_only=True):
    """`type` is "custom" or absent for a client's own tool; `client_tools` knows others that a client runs, the rest run at
    Anthropic."""

    name: str
    input_schema: dict[str, Any] | None = None
    description: str | None = None
    type: str | None = None
    strict: bool | None = None
    cache_control: CacheControl | None = None


class ToolChoice(msgspec.Struct, frozen=True, kw_only=True):
    type: str
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(msgspec.Struct, frozen=True, kw_only=True):
    type: str
    budget_tokens: int | None = None
    display: str | None = None


class OutputFormat(msgspec.Struct, frozen=True, kw_only=True):
    type: str
    schema: dict[str, Any] | None = None


class OutputConfig(msgspec.Struct, frozen=True, kw_only=True):
    effort: str | None = None
    format: OutputFormat | None = None


class CountTokensBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/messages/count_tokens: what makes up the prompt."""

    messages: list[Message]
    model: str | None = None
    system: str | list[Block] | None = None
    tools: list[Tool] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None
    thread: dict[str, Any] | None = None
    cache_control: CacheControl | None = None


class MessagesBody(CountTokensBody, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/messages. `seed` is not Anthropic's: a router sends it, so that another server can go on with a stream."""

    max_tokens: int
    stream: bool | None = None
    stop_sequences: list[str] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = None
