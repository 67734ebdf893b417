"""Conversation: checks a chat request's messages and translates them for the chat template.

Owns the translation from the API's spelling to that of the templates (a list of text parts becomes one text, a call's arguments
become an object, reasoning goes under the template's own name), the check of what a model's template supports, the prompt that
the template renders, the pairs of calls and results, and the breakpoints up to which a conversation stays in the cache.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import msgspec

from vnext.runtime.protocol.sampling_params import InvalidRequest
from vnext.server.context.openai_types import ChatBody, ChatMessage, ToolCall
from vnext.text.template import ChatTemplate, JsonObject

_ROLES = ("system", "developer", "user", "assistant", "tool")
ANSWERS = ("assistant", "tool")
TEXTS = "text", "refusal"
MEDIA = MappingProxyType({"image_url": "image", "video_url": "video", "audio_url": "audio", "input_audio": "audio"})
"""Types of parts, each with its text, or the address of an image, a video or a sound, under the type's own name."""
KINDS = MappingProxyType({"image": "images", "video": "videos", "audio": "sounds"})
NO_MEDIA: Mapping[str, str] = MappingProxyType({})
TTLS_S = {"5m": 300, "1h": 3600}
"""Of Anthropic's `cache_control`; "5m" is the default."""


def prompt_text(template: ChatTemplate, body: ChatBody, tools: list[dict[str, Any]] | None, limit_s: float) -> str:
    """The conversation as the template renders it. Raises InvalidRequest, TemplateSlow."""
    template = template.for_tools(tools)
    messages = template.arranged(template.with_words(shown_messages(body, template), tools))
    variables = {"tools": tools} | _thinking(body) | (body.chat_template_kwargs or {})
    text = template.render(messages, variables, begins_answer(body), limit_s)
    return up_to_the_last_words(text, messages) if body.continue_final_message else text


def text_size(body: ChatBody) -> int:
    """About the number of characters that the template reads, as a measure of its cost. Raises InvalidRequest."""
    return sum(map(_message_size, body.messages)) + json_size(body.tools or (), "tools") + json_size(
        body.chat_template_kwargs or (), "chat_template_kwargs"
    )


def _message_size(message: ChatMessage) -> int:
    content = message.content or ""
    words = len(content) if isinstance(content, str) else sum(len(part.text or part.refusal or "") for part in content)
    calls = sum(len(call.function.text) + 1_000 for call in message.tool_calls or ())
    return words + len(message.reasoning or message.reasoning_content or "") + calls + 1_000


def json_size(value: Any, name: str) -> int:
    """The length of the JSON text of the field `name`. Raises InvalidRequest where it is nested too deeply to be written."""
    try:
        return len(msgspec.json.encode(value))
    except RecursionError as error:
        raise InvalidRequest(f"{name} is nested too deeply: make it flatter.", name) from error


def shown_messages(body: ChatBody, template: ChatTemplate) -> list[dict[str, Any]]:
    """The messages for the template. Raises InvalidRequest."""
    if not body.messages:
        raise InvalidRequest("messages is an empty list: send at least one message.", "messages")
    return [_message(message, f"messages[{place}]", template) for place, message in enumerate(body.messages)]


def _thinking(body: ChatBody) -> dict[str, Any]:
    """The variables by which templates switch reasoning. An effort of "none" switches it off."""
    effort, thinks = body.reasoning_effort, body.enable_thinking
    thinks = False if thinks is None and effort == "none" else thinks
    return {name: value for name, value in (("reasoning_effort", effort), ("enable_thinking", thinks)) if value is not None}


def asks_to_think(body: ChatBody) -> bool:
    """Whether the request switches reasoning on."""
    given = _thinking(body) | (body.chat_template_kwargs or {})
    effort = given.get("reasoning_effort")
    return bool(given.get("enable_thinking") or given.get("thinking") or (effort and effort != "none"))


def begins_answer(body: ChatBody) -> bool:
    """Whether the prompt ends with the beginning of an assistant's message. Raises InvalidRequest."""
    if not body.continue_final_message:
        return body.add_generation_prompt is not False
    if body.add_generation_prompt:
        raise InvalidRequest(
            "continue_final_message is true and so is add_generation_prompt: an answer continues a message or begins one, "
            "leave one out.",
            "continue_final_message",
        )
    return False


def up_to_the_last_words(text: str, messages: list[dict[str, Any]]) -> str:
    """The prompt up to the end of the last message, which the answer continues, without the template's closing text."""
    words = messages[-1]["content"]
    place = text.rfind(words.strip())
    if not words.strip() or place < 0:
        raise InvalidRequest(
            "continue_final_message is true, and the last message's text is not in the prompt that the chat template makes "
            "of it: send a last message with words to be continued.",
            "continue_final_message",
        )
    begun = text[place:]
    kept = words.lstrip() if begun.startswith(words.lstrip()) else words.strip()
    return text[: place + len(kept)]


def _message(message: ChatMessage, path: str, template: ChatTemplate) -> dict[str, Any]:
    """One message as the template sees it. Reasoning goes to templates that know what to show of it."""
    if message.role not in _ROLES:
        raise InvalidRequest(f"{path}.role is {message.role!r}: it must be one of {', '.join(_ROLES)}.", f"{path}.role")
    role = template.developer_role if message.role == "developer" else message.role
    shown: dict[str, Any] = {"role": role, "content": content_of(message, path, template.media)}
    if message.name is not None:
        shown["name"] = message.name
    if message.tool_call_id is not None:
        shown["tool_call_id"] = message.tool_call_id
    thought = message.reasoning if message.reasoning_content is None else message.reasoning_content
    if thought and message.role == "assistant" and template.reasoning_name:
        shown[template.reasoning_name] = thought
    if template.dialect and template.dialect.is_whole and thought and message.tool_calls:
        shown[template.reasoning_name or ""] = "\n\n".join(filter(None, (thought, shown["content"])))
        shown["content"] = ""  # gpt-oss' template shows either before a call, and refuses both
    if message.tool_calls:
        if message.role != "assistant":
            raise InvalidRequest(f"{path}.tool_calls belongs to an assistant's message: leave it out.", f"{path}.tool_calls")
        shown["tool_calls"] = [_call(call) for call in message.tool_calls]
    return shown


def _call(call: ToolCall) -> dict[str, Any]:
    """A call of the history: what was written is read, never judged."""
    text = call.function.text
    try:
        arguments = JsonObject(msgspec.json.decode(text, type=dict[str, Any]), text)
    except (msgspec.MsgspecError, UnicodeError, RecursionError):  # of an answer that was cut off, perhaps: it is shown as it is
        arguments = JsonObject({"arguments": text}, text)
    shown = {"type": "function", "function": {"name": call.function.name, "arguments": arguments}}
    return shown if call.id is None else {"id": call.id, **shown}


def content_of(message: ChatMessage, path: str, marks: Mapping[str, str] = NO_MEDIA) -> str:
    """A message's text, in which one of the `marks` stands for each image, video and sound; none of a kind that the model does not
    read. Raises InvalidRequest."""
    if message.content is None and message.role in ANSWERS:  # an answer may be all calls, reasoning or a refusal, a result nothing
        return message.refusal or ""
    if message.content is None:
        raise InvalidRequest(f"{path}.content is missing: send a text or a list of text parts.", f"{path}.content")
    if isinstance(message.content, str):
        return message.content
    read, found = {part: marks[kind] for part, kind in MEDIA.items() if kind in marks}, ""
    for place, part in enumerate(message.content):
        where = f"{path}.content[{place}]"
        if part.type not in (*TEXTS, *read):
            *kinds, last = "text", *(many for kind, many in KINDS.items() if kind in marks)
            reads = f"{', '.join(kinds)} and {last}" if kinds else "text only here"
            raise InvalidRequest(f"{where}.type is {part.type!r}: this server reads {reads}, leave it out.", f"{where}.type")
        if getattr(part, part.type) is None:
            raise InvalidRequest(f"{where}.{part.type} is missing: it is required.", f"{where}.{part.type}")
        is_text = part.type in TEXTS
        between = "\n" if is_text and place and message.content[place - 1].type in TEXTS else ""
        found += between + (getattr(part, part.type) if is_text else read[part.type])
    return found


def images_of(messages: Sequence[ChatMessage]) -> list[tuple[str, str, str]]:
    """The address of each image, video and sound, where it stands, and its kind. Raises InvalidRequest."""
    for place, message in enumerate(messages):
        for at, part in enumerate(message.content if isinstance(message.content, list) else ()):
            if any(given is not None and given.fps is not None for given in (part.image_url, part.video_url, part.audio_url)):
                path = f"messages[{place}].content[{at}].{part.type}.fps"
                raise InvalidRequest(f"{path} is not supported: send mm_processor_kwargs.fps, which is of all videos.", path)
    return [
        (given.url, f"messages[{place}].content[{at}].{part.type}", MEDIA[part.type])
        for place, message in enumerate(messages)
        if isinstance(message.content, list)
        for at, part in enumerate(message.content)
        if part.type in MEDIA and (given := getattr(part, part.type)) is not None
    ]


class CallPairs:
    """The calls of a conversation from its beginning on. Mutable. `path` is where the client wrote an id."""

    def __init__(self) -> None:
        self._known: set[str] = set()
        self._answered: set[str] = set()
        self._open: dict[str, str] = {}

    def call(self, id_: str, path: str, is_cut: bool = False) -> None:
        """Take in a call; `is_cut`: its answer ended within it. Raises InvalidRequest for one with the id of another that waits."""
        if id_ in self._open:
            raise InvalidRequest(f"{path} is {id_[:60]!r}: a call that has no result yet has this id too, make each unique.", path)
        self._known.add(id_)
        self._answered.discard(id_)
        if not is_cut:
            self._open[id_] = path

    def result(self, id_: str | None, path: str) -> None:
        """Take in a result. Raises InvalidRequest for one without an id, of no call before it, or of one that has a result."""
        if not id_:
            raise InvalidRequest(f"{path} is missing: a result names the call that it answers.", path)
        if id_ not in self._known:
            raise InvalidRequest(f"{path} is {id_[:60]!r}: no call before it has this id.", path)
        if id_ in self._answered:
            raise InvalidRequest(f"{path} is {id_[:60]!r}: the call has a result already, send one for each call.", path)
        self._answered.add(id_)
        self._open.pop(id_, None)

    def end(self) -> None:
        """Raise InvalidRequest for a call without a result."""
        for id_, path in self._open.items():
            raise InvalidRequest(f"{path}: the call {id_[:60]!r} has no result behind it, send one for each call.", path)


def check_calls(messages: Sequence[ChatMessage]) -> None:
    """Raise InvalidRequest for a chat whose calls and results are no pairs. A call without an id is not looked for."""
    pairs = CallPairs()
    for place, message in enumerate(messages):
        for at, call in enumerate(message.tool_calls or ()):
            if call.id is not None:
                pairs.call(call.id, f"messages[{place}].tool_calls[{at}].id", not is_object(call.function.text))
        if message.role == "tool":
            pairs.result(message.tool_call_id, f"messages[{place}].tool_call_id")
    pairs.end()


def is_object(text: str) -> bool:
    """Whether the text is a JSON object, or empty for none."""
    try:
        return isinstance(msgspec.json.decode(text or "{}"), dict)
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return False


class Breakpoint(NamedTuple):
    """The conversation up to and with its first `messages` messages stays for `seconds`."""

    messages: int
    seconds: int


def needed(breakpoints: list[Breakpoint]) -> list[Breakpoint]:
    """Those that no later one covers, the longest prefix first: a later one that lasts as long keeps all before it."""
    found: list[Breakpoint] = []
    for each in sorted(breakpoints, reverse=True):
        if not found or each.seconds > found[-1].seconds:
            found.append(each)
    return found
