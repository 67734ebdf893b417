"""Conversation: checks a chat request's messages and tools and translates them for the chat template.

Owns the translation from the API's spelling to that of the templates (a list of text parts becomes one text, a call's
arguments become an object), the check of what a model's template supports, and the prompt that the template renders.
"""

from __future__ import annotations

from typing import Any

import msgspec

from vnext.sampling_params import InvalidRequest
from vnext.server.context.openai_types import ChatBody, ChatMessage, ToolCall
from vnext.text.template import ChatTemplate
from vnext.text.tool_calls import Form

_ROLES = ("system", "developer", "user", "assistant", "tool")


def prompt_text(template: ChatTemplate, body: ChatBody, tools: list[dict[str, Any]] | None, limit_s: float) -> str:
    """The conversation as the template renders it. Raises InvalidRequest, TemplateSlow."""
    messages = shown_messages(body, template.tool_form)
    effort = {} if body.reasoning_effort is None else {"reasoning_effort": body.reasoning_effort}
    variables = {"tools": tools} | effort | (body.chat_template_kwargs or {})
    text = template.render(messages, variables, begins_answer(body), limit_s)
    return up_to_the_last_words(text, messages) if body.continue_final_message else text


def text_size(body: ChatBody) -> int:
    """About the number of characters that the template reads, as a measure of its cost."""
    texts = (message.content for message in body.messages)
    words = sum(len(text) if isinstance(text, str) else sum(len(part.text or "") for part in text or ()) for text in texts)
    return words + 1_000 * (len(body.messages) + len(body.tools or ()) + len(body.chat_template_kwargs or ()))


def shown_messages(body: ChatBody, form: Form | None) -> list[dict[str, Any]]:
    """The messages for the template. `form`: how the model writes tool calls, None if it does not. Raises InvalidRequest."""
    if not body.messages:
        raise InvalidRequest("messages is an empty list: send at least one message.", "messages")
    return [_message(message, f"messages[{place}]", form) for place, message in enumerate(body.messages)]


def shown_tools(body: ChatBody, form: Form | None) -> list[dict[str, Any]] | None:
    """The tools for the template, or None where the model may call none. Raises InvalidRequest."""
    if body.tool_choice not in (None, "auto", "none"):
        raise InvalidRequest(
            "tool_choice is neither 'auto' nor 'none': this server cannot make a model call a tool, leave it out.",
            "tool_choice",
        )
    if not body.tools or body.tool_choice == "none":
        return None
    if form is None:
        raise InvalidRequest(
            "tools is given, and the chat template of this model knows none that this server can read: leave it out, or start "
            "the server with a --chat-template that does.",
            "tools",
        )
    for place, tool in enumerate(body.tools):
        if tool.type != "function":
            raise InvalidRequest(f"tools[{place}].type is {tool.type!r}: only 'function' is supported.", f"tools[{place}].type")
    return msgspec.to_builtins(body.tools)


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


def _message(message: ChatMessage, path: str, form: Form | None) -> dict[str, Any]:
    """One message as the template sees it."""
    roles = _ROLES if form else _ROLES[:-1]
    if message.role not in roles:
        raise InvalidRequest(f"{path}.role is {message.role!r}: it must be one of {', '.join(roles)}.", f"{path}.role")
    shown: dict[str, Any] = {"role": message.role, "content": _content(message, path)}
    if message.name is not None:
        shown["name"] = message.name
    if message.tool_call_id is not None:
        shown["tool_call_id"] = message.tool_call_id
    if message.tool_calls:
        if message.role != "assistant" or form is None:
            raise InvalidRequest(
                f"{path}.tool_calls belongs to an assistant whose chat template knows tools: leave it out.",
                f"{path}.tool_calls",
            )
        shown["tool_calls"] = [_call(call, f"{path}.tool_calls[{place}]") for place, call in enumerate(message.tool_calls)]
    return shown


def _call(call: ToolCall, path: str) -> dict[str, Any]:
    try:
        arguments = msgspec.json.decode(call.function.arguments or "{}", type=dict[str, Any])
    except (msgspec.DecodeError, RecursionError) as error:
        where = f"{path}.function.arguments"
        raise InvalidRequest(f"{where} is not the text of a JSON object: {error}.", where) from error
    shown = {"type": "function", "function": {"name": call.function.name, "arguments": arguments}}
    return shown if call.id is None else {"id": call.id, **shown}


def _content(message: ChatMessage, path: str) -> str:
    if message.content is None and message.tool_calls:
        return ""
    if message.content is None:
        raise InvalidRequest(f"{path}.content is missing: send a text or a list of text parts.", f"{path}.content")
    if isinstance(message.content, str):
        return message.content
    for place, part in enumerate(message.content):
        where = f"{path}.content[{place}]"
        if part.type != "text":
            raise InvalidRequest(f"{where}.type is {part.type!r}: only 'text' is supported.", f"{where}.type")
        if part.text is None:
            raise InvalidRequest(f"{where}.text is missing: it is required.", f"{where}.text")
    return "\n".join(part.text or "" for part in message.content)
