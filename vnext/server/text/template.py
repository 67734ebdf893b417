"""Chat template: messages become the one text that a model was trained on.

Owns the sandboxed environment in which a checkpoint's Jinja source runs, with the helpers that such sources expect. A
template that refuses the messages, or fails on them, is the client's mistake and says what it said.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
from jinja2.ext import Extension
from jinja2.nodes import Node
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from vnext.sampling_params import InvalidRequest
from vnext.server.text.tool_calls import form_of

# What an expression can raise.
_DATA_ERRORS = (TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError)


class TemplateUnreadable(Exception):
    """The template is no file or no valid Jinja source: one sentence with the path or the line."""


class ChatTemplate:
    """A compiled template. `special_tokens` are variables in it (bos_token, eos_token, ...); `tool_form`: how it has the model
    write tool calls, None where there are none to be read."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        try:
            self._template = _environment().from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise TemplateUnreadable(f"The chat template is broken in line {error.lineno}: {error.message}.") from error
        self._special_tokens = dict(special_tokens)
        self.tool_form = form_of(source)

    def render(
        self, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any], add_generation_prompt: bool = True
    ) -> str:
        """The prompt's text. Raises InvalidRequest with what the template said against the messages."""
        given = self._special_tokens | {"tools": None, "documents": None} | dict(variables)
        try:
            return self._template.render(given, messages=messages, add_generation_prompt=add_generation_prompt)
        except (jinja2.TemplateError, *_DATA_ERRORS) as error:
            raise InvalidRequest(f"The model's chat template rejects these messages: {error}.", "messages") from error


class _GenerationBlock(Extension):
    """`{% generation %}...{% endgeneration %}` marks answers for training; here it is its content."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> list[Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def read_template(path: str) -> str:
    """The source in a file of the user's. Raises TemplateUnreadable."""
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise TemplateUnreadable(f"The chat template {path} cannot be read: {error}.") from error


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, "jinja2.ext.loopcontrols"]
    )
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    environment.filters["tojson"] = _to_json
    return environment


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


def _to_json(value: Any, indent: int | None = None, ensure_ascii: bool = False, **options: Any) -> str:
    """Without Jinja's escapes for HTML, which no model was trained on."""
    return json.dumps(value, indent=indent, ensure_ascii=ensure_ascii, **options)
