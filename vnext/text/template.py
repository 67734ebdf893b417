"""Chat template: renders messages into one text, in the format on which the model was trained.

Owns the sandboxed environment in which a checkpoint's Jinja source runs, with the helpers that such sources expect, and the
limit on its computing time: every loop iteration and every macro call checks the clock. If a template refuses the messages or
fails on them, the error is the client's and contains the template's message.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
import msgspec
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser

from vnext.runtime.protocol.sampling_params import InvalidRequest
from vnext.text.dialects import generic
from vnext.text.dialects.table import dialect_of, shows_tools
from vnext.text.reasoning import Marks, marks_of
from vnext.text.template_bounds import BoundedEnvironment, bound_concatenations, within
from vnext.text.turns import Turns, arranged, turns_of

RENDER_LIMIT_S = 0.3
PROBE_LIMIT_S = 0.05
REASONING_NAMES = ("reasoning_content", "thinking", "reasoning")
# The errors that an expression can raise.
_DATA_ERRORS = (TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError)


_TICK = "vnext_tick"
_TICKS_PER_LOOK = 16


class TemplateSlow(Exception):
    """The template exceeded its time limit."""


class TemplateUnreadable(Exception):
    """The template cannot be read or is not valid Jinja: one sentence with the path or the line."""


class JsonObject(dict[str, Any]):
    """An object that was read from `text`. Templates write it as that text, so that what a model wrote keeps its tokens."""

    def __init__(self, value: Mapping[str, Any], text: str) -> None:
        super().__init__(value)
        self.text = text


class ChatTemplate:
    """A compiled template. `special_tokens` are variables in it (bos_token, eos_token, ...); `dialect`: how it makes the model
    write tool calls, found from it and the tokenizer's added tokens; without `shows_tools` the template knows none, and
    `generic.with_tools` puts them into the messages, the system's if it `knows_system`; `marks`: those around the model's
    reasoning, None where it knows none; `developer_role`: its role for the messages of OpenAI's role of that name;
    `reasoning_name`: the member of a message from which it takes an earlier answer's reasoning, None where it takes none.

    `tool_parser` and `reasoning_parser`, vLLM's names, replace what is found of dialect and marks. `tool_source`: another template
    for requests with tools, whose dialect is that of all; "" for none."""

    def __init__(
        self, source: str, special_tokens: Mapping[str, str], added_tokens: Collection[str] = (), tool_parser: str = "",
        reasoning_parser: str = "", tool_source: str = "",
    ) -> None:  # fmt: skip
        """Raises TemplateUnreadable, ValueError for a parser that is not known."""
        try:
            self._template = _compiled(source)
        except jinja2.TemplateSyntaxError as error:
            raise TemplateUnreadable(f"The chat template is broken in line {error.lineno}: {error.message}.") from error
        self._special_tokens = dict(special_tokens)
        found = dialect_of(source, added_tokens, tool_parser)
        self.shows_tools, self.dialect = shows_tools(source), found or generic.DIALECT
        self.knows_system = "system" in source
        self.marks = self._tried(marks_of(source, reasoning_parser))
        self.developer_role = "developer" if "developer" in source else "system"
        self.reasoning_name = next((name for name in REASONING_NAMES if re.search(rf"\b{name}\b", source)), None)
        self._turns = self._tried_turns()
        self._with_tools = self
        if tool_source:
            self._with_tools = ChatTemplate(tool_source, special_tokens, added_tokens, tool_parser, reasoning_parser)
            self.dialect = self._with_tools.dialect

    def with_words(self, messages: Sequence[Mapping[str, Any]], tools: Any) -> list[dict[str, Any]]:
        """The messages, in which tools and calls are words where the template knows none."""
        return list(messages) if self.shows_tools else generic.with_tools(messages, tools, self.knows_system)

    def for_tools(self, tools: Any) -> ChatTemplate:
        """The template of a request with these tools, or with none."""
        return self._with_tools if tools else self

    def _tried(self, marks: Marks | None) -> Marks | None:
        """The marks with what the template does when reasoning is switched off."""
        if marks is None:
            return None
        try:
            prompt = self.render([{"role": "user", "content": "x"}], {"enable_thinking": False, "thinking": False})
        except (InvalidRequest, TemplateSlow):
            return marks
        return msgspec.structs.replace(marks, is_closed_off=prompt.rstrip().endswith(marks.close))

    def _tried_turns(self) -> Turns:
        """The orders of roles that the template takes."""
        try:
            return turns_of(self._probed)
        except TemplateSlow:
            return Turns()

    def _probed(self, messages: list[dict[str, Any]]) -> str | None:
        try:
            return self.render(messages, {}, limit_s=PROBE_LIMIT_S)
        except InvalidRequest:
            return None

    def arranged(self, messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """The messages in an order of roles that the template takes."""
        return arranged(messages, self._turns)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        variables: Mapping[str, Any],
        add_generation_prompt: bool = True,
        limit_s: float = RENDER_LIMIT_S,
    ) -> str:
        """The prompt's text. Raises InvalidRequest with the template's error message, and TemplateSlow after `limit_s` of this
        thread's computing time."""
        given = self._special_tokens | {"tools": None, "documents": None} | dict(variables)
        try:
            return within(
                self._template.generate(
                    given, messages=messages, add_generation_prompt=add_generation_prompt, **{_TICK: _ticker(limit_s)}
                )
            )
        except (jinja2.TemplateError, MemoryError, *_DATA_ERRORS) as error:
            raise InvalidRequest(f"The model's chat template rejects these messages: {error}.", "messages") from error


class _GenerationBlock(Extension):
    """`{% generation %}...{% endgeneration %}`, which marks answers for training, renders as its content."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def read_template(path: str) -> str:
    """The source in a user's file. Raises TemplateUnreadable."""
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise TemplateUnreadable(f"The chat template {path} cannot be read: {error}.") from error


def _compiled(source: str) -> jinja2.Template:
    """Compile with a check of the clock in every loop and macro; `template_bounds` bounds single expressions."""
    environment = _environment()
    tree = environment.parse(source)
    for loop in tree.find_all(nodes.For):
        if loop.test is not None:  # the test also runs for the elements that it leaves out
            loop.test = nodes.And(_tick(), loop.test)
    for block in tree.find_all((nodes.For, nodes.Macro, nodes.CallBlock)):
        block.body.insert(0, nodes.ExprStmt(_tick()))
    bound_concatenations(tree)
    tree.set_environment(environment)
    return environment.template_class.from_code(environment, environment.compile(tree), environment.make_globals(None))


def _tick() -> nodes.Call:
    return nodes.Call(nodes.Name(_TICK, "load", lineno=0), [], [], None, None, lineno=0)


def _ticker(limit_s: float) -> Callable[[], bool]:
    """A function that raises TemplateSlow once this thread has computed for `limit_s`. It returns True, so that it can be the
    test of a loop that leaves nothing out."""
    end_s, count = time.thread_time() + limit_s, 0

    def tick() -> bool:
        nonlocal count
        count += 1
        if count % _TICKS_PER_LOOK == 0 and time.thread_time() > end_s:
            raise TemplateSlow(f"{limit_s:g} s")
        return True

    return tick


def _environment() -> BoundedEnvironment:
    environment = BoundedEnvironment(
        {"tojson": _to_json}, trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, "jinja2.ext.loopcontrols"]
    )
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


def _to_json(value: Any, indent: int | None = None, ensure_ascii: bool = False, **options: Any) -> str:
    """JSON without Jinja's HTML escapes, which no model was trained on."""
    if isinstance(value, JsonObject) and indent is None and not ensure_ascii and not options:
        return value.text
    return json.dumps(value, indent=indent, ensure_ascii=ensure_ascii, **options)
