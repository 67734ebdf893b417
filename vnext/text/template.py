"""Chat template: renders messages into one text, in the format on which the model was trained.

Owns the sandboxed environment in which a checkpoint's Jinja source runs, with the helpers that such sources expect, and the
limit on its computing time: every loop iteration and every macro call checks the clock. If a template refuses the messages or
fails on them, the error is the client's and contains the template's message.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence, Sized
from datetime import datetime
from functools import wraps
from pathlib import Path
from typing import Any

import jinja2
import msgspec
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

from vnext.base.spelling import reason
from vnext.runtime.protocol.sampling_params import InvalidRequest
from vnext.text.dialects.table import GENERIC, dialect_of, shows_tools, with_tools
from vnext.text.reasoning import Marks, marks_of
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
    `with_tools` puts them into the messages, the system's if it `knows_system`; `marks`: those around the model's
    reasoning, None where it knows none; `developer_role`: its role for the messages of OpenAI's role of that name;
    `reasoning_name`: the member of a message from which it takes an earlier answer's reasoning, None where it takes none.

    `media`: what stands for an "image", a "video" and an "audio" in messages and prompts, {} where the model reads none; a template
    that takes contents as lists of parts alone gets such, and one that takes them too of messages with sounds, which it counts.

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
        self.shows_tools, self.dialect = shows_tools(source), found or GENERIC
        self.knows_system = "system" in source
        self.media: Mapping[str, str] = {}
        self._takes_parts = self._may_take_parts = False
        if "content" in source and "type" in source:
            self._takes_parts, self._may_take_parts = self._tried_parts()
        self.marks = self._tried(marks_of(source, reasoning_parser))
        self.developer_role = "developer" if "developer" in source else "system"
        self.reasoning_name = next((name for name in REASONING_NAMES if re.search(rf"\b{name}\b", source)), None)
        self._turns = self._tried_turns()
        self._with_tools = self
        if tool_source:
            self._with_tools = ChatTemplate(tool_source, special_tokens, added_tokens, tool_parser, reasoning_parser)
            self.dialect = self._with_tools.dialect

    def mark_media(self, marks: Mapping[str, str]) -> None:
        """These stand for images, videos and sounds from now on, by kind."""
        self.media = self._with_tools.media = dict(marks)

    def _in_parts(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """The message with its content as a list, in which each mark is an image, video or sound, if the template takes such."""
        content, kinds = message.get("content"), {mark: kind for kind, mark in self.media.items()}
        if not isinstance(content, str) or not (self._takes_parts or (self._may_take_parts and self.media["audio"] in content)):
            return dict(message)
        pieces = re.split(f"({'|'.join(map(re.escape, kinds))})", content) if kinds else [content]
        texts = [text for text in pieces if text or not content]
        own = {"image": {"type": "image"}, "video": {"type": "video"}, "audio": {"type": "audio", "audio": ""}}
        parts = [own[kinds[text]] if text in kinds else {"type": "text", "text": text} for text in texts]
        return {**message, "content": parts}

    def _tried_parts(self) -> tuple[bool, bool]:
        """Whether the template shows a text only as a part of a list, and whether it shows it there."""
        word = "vnextprobe"
        as_text = self._probed([{"role": "user", "content": word}])
        as_list = self._probed([{"role": "user", "content": [{"type": "text", "text": word}]}])
        is_shown = word in (as_list or "")
        return is_shown and word not in (as_text or ""), is_shown

    def with_words(self, messages: Sequence[Mapping[str, Any]], tools: Any) -> list[dict[str, Any]]:
        """The messages, in which tools and calls are words where the template knows none."""
        own = [dict(message) for message in messages]
        return own if self.shows_tools else with_tools(own, tools, self.knows_system)

    def for_tools(self, tools: Any) -> ChatTemplate:
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
        if self._takes_parts or "audio" in self.media:
            messages = [self._in_parts(message) for message in messages]
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
        raise TemplateUnreadable(f"The chat template {path} cannot be read: {reason(error)}.") from error


def _compiled(source: str) -> jinja2.Template:
    """Compile with a check of the clock in every loop and macro; `template_bounds` bounds single expressions."""
    environment = _environment()
    tree = environment.parse(source)
    for loop in tree.find_all(nodes.For):
        if loop.test is not None:  # the test also runs for the elements that it leaves out
            loop.test = nodes.And(_tick(), loop.test)
    for block in tree.find_all((nodes.For, nodes.Macro, nodes.CallBlock)):
        assert isinstance(block, nodes.For | nodes.Macro | nodes.CallBlock)
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


# ---- the sandbox and its limits ----------------------------------------------------------------------------------
# Template bounds: Jinja's sandbox with limits on what one expression of a template may make.
#
# Owns the sizes. A template's loops are ended by the clock (`template`); one call in C cannot be, so what it would make is judged
# before: products, sums, paddings, replacements, joins. The error is the client's, in one sentence.


SIZE_MAX = 2**25
"""Characters or elements, as many as the largest body has bytes: 10 to 100 ms of computing."""
BITS_MAX = 2**16
WIDTH_MAX = 10_000
"""For numbers that a template gives to functions, filters and formats: widths, indents, counts."""
CONCAT = "vnext_concat"
_WIDE = re.compile(r"\d{5}|\*")
_MEASURED = ("replace", "join", "expandtabs")


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """A sandbox in which no expression makes a value beyond the sizes above. Raises TemplateError where one would."""

    intercepted_binops = frozenset(("+", "*", "**", "%"))

    def __init__(self, filters: dict[str, Callable[..., Any]], **options: Any) -> None:
        """`filters`: besides Jinja's own, or in their place."""
        super().__init__(**options)
        self.filters = {name: _bounded(name, function) for name, function in (self.filters | filters).items()}
        self.globals[CONCAT] = _concat
        del self.globals["lipsum"]  # makes texts of any length

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        _check(_made_by(operator, left, right))
        return super().call_binop(context, operator, left, right)

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805  (as the base class)
        method = getattr(__obj, "__wrapped__", __obj)  # the sandbox wraps str.format
        owner, name = getattr(method, "__self__", None), getattr(method, "__name__", "")
        if isinstance(owner, str | bytes | int):
            args = _listed(args)
            _check_call(name, (owner, *args), kwargs)
        return super().call(__context, __obj, *args, **kwargs)


def bound_concatenations(tree: nodes.Template) -> None:
    """Have each `a ~ b` of a template judged too."""
    for parent in [tree, *tree.find_all(nodes.Node)]:
        for field, value in parent.iter_fields():
            if isinstance(value, nodes.Concat):
                setattr(parent, field, _judged(value))
            elif isinstance(value, list):
                value[:] = [_judged(each) if isinstance(each, nodes.Concat) else each for each in value]


def within(pieces: Iterable[str]) -> str:
    """The text of a template's pieces. Raises TemplateError where it is too long."""
    kept, size = [], 0
    for piece in pieces:
        size += len(piece)
        if size > SIZE_MAX:
            _check(size)
        kept.append(piece)
    return "".join(kept)


def _judged(concat: nodes.Concat) -> nodes.Call:
    return nodes.Call(nodes.Name(CONCAT, "load", lineno=concat.lineno), concat.nodes, [], None, None, lineno=concat.lineno)


def _concat(*values: Any) -> str:
    return within(map(str, values))


def _bounded(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """The filter, which may need the context or the environment before its value."""
    offset = 1 if hasattr(function, "jinja_pass_arg") else 0

    @wraps(function)
    def checked(*args: Any, **kwargs: Any) -> Any:
        args = args[:offset] + _listed(args[offset:])
        _check_call(name, args[offset:], kwargs)
        return function(*args, **kwargs)

    return checked


def _listed(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Iterators as lists, because measuring them takes them."""
    return tuple(list(each) if isinstance(each, Iterator) else each for each in args)


def _check_call(name: str, values: tuple[Any, ...], options: dict[str, Any]) -> None:
    """Judge a method or a filter by the value it is of, and what it is given."""
    value, given = (values[0] if values else ""), (*values[1:], *options.values())
    if any(isinstance(each, int) and abs(each) > WIDTH_MAX for each in given):
        raise jinja2.TemplateError(f"it gives {name} a number beyond {WIDTH_MAX}")
    if name in ("format", "format_map") and isinstance(value, str) and _WIDE.search(value):
        raise jinja2.TemplateError("it asks for a format of too great a width")
    if name in _MEASURED and isinstance(value, Sized):
        longest = max((len(str(each)) for each in given), default=0) if name != "join" else 0
        _check(_joined(value, given) if name == "join" else len(value) + (len(value) + 1) * longest if longest > 1 else 0)


def _joined(value: Any, given: tuple[Any, ...]) -> int:
    """What the method (of the separator) or the filter (of the list) makes."""
    items, separator = (given[0] if given else (), value) if isinstance(value, str) else (value, given[0] if given else "")
    if not isinstance(items, Collection) or not isinstance(separator, str):
        return 0
    return sum(len(each) for each in items if isinstance(each, str)) + len(items) * len(separator)


def _made_by(operator: str, left: Any, right: Any) -> int:
    """The size of a result: characters, elements, or as many as a number of too many bits would count for."""
    if isinstance(left, int) and isinstance(right, int):
        bits = left.bit_length() * max(right, 1) if operator == "**" else left.bit_length() + right.bit_length()
        return SIZE_MAX + 1 if bits > BITS_MAX else 0
    if operator == "*":
        sized, times = (left, right) if isinstance(left, Sized) else (right, left)
        return len(sized) * times if isinstance(sized, Sized) and isinstance(times, int) else 0
    if operator == "%" and isinstance(left, str) and _WIDE.search(left):
        return SIZE_MAX + 1
    return len(left) + len(right) if operator == "+" and isinstance(left, Sized) and isinstance(right, Sized) else 0


def _check(size: int) -> None:
    if size > SIZE_MAX:
        raise jinja2.TemplateError(f"it makes a text or a list of more than {SIZE_MAX} parts, or a number as large")
