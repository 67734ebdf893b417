"""What a program passes to LLM and AsyncLLM, as one form: prompts, conversations, parameters.

Owns the types that are taken, and the sentence for each that is not: it names the caller's argument. Dictionaries stand for
structs, arrays and iterators for lists, where they can mean one thing only. Knows no model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import index
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar

import msgspec

from vnext.runtime.protocol.lora_request import AdapterChoice, LoRARequest
from vnext.runtime.protocol.sampling_params import InvalidRequest, SamplingParams, as_struct, kind_of

Prompt = str | Sequence[int] | Mapping[str, Any]
"""A text, token ids, {"prompt": a text}, also with images or a sound as "multi_modal_data", or {"prompt_token_ids": token ids}."""


class Video(NamedTuple):
    """Bytes of a file, an address, or (frames uint8 [N, H, W, 3], how many of them a second)."""

    content: object


class Sound(NamedTuple):
    """Bytes of a file, an address, or (samples [N], their rate)."""

    content: object


class WithImages(NamedTuple):
    """A text that marks its images as the model does, and these: bytes of files, addresses, images of Pillow or arrays, a Video or
    a Sound; and `names` for them. `is_talk`: the text is a conversation's, and has its special tokens."""

    text: str
    images: list[object]
    names: tuple[str, ...]
    is_talk: bool = False


ReadPrompt = str | list[int] | WithImages
Message = Mapping[str, Any]
Made = TypeVar("Made")


class Conversation(NamedTuple):
    """Messages whose contents are texts, in which MARKS stand for images, videos and sounds; (name, image) of these, as WithImages
    has them."""

    messages: list[Message]
    images: list[tuple[str, object]]


Params = SamplingParams | Mapping[str, Any] | None
"""SamplingParams, a dictionary of its fields, or None for the defaults."""
ParamsChoice = Params | Sequence[Params]
"""One for all prompts, or a list with one for each."""

MARKS = MappingProxyType({"image": "<image>", "video": "<video>", "audio": "<audio>"})
MEDIA = MappingProxyType(
    {
        **dict.fromkeys(("image_url", "image", "image_pil"), "image"), **dict.fromkeys(("video_url", "video"), "video"),
        **dict.fromkeys(("audio_url", "audio", "input_audio"), "audio"),
    }
)  # fmt: skip
"""Types of parts, each with its kind."""
AS: Mapping[str, Callable[[object], object]] = MappingProxyType({"image": lambda image: image, "video": Video, "audio": Sound})
A_PROMPT = 'a text, token ids, {"prompt": ...} or {"prompt_token_ids": ...}'
A_MESSAGE = '{"role": ..., "content": ...}'


def as_prompts(prompts: Prompt | Iterable[Prompt], name: str = "prompts") -> list[ReadPrompt]:
    """Each prompt's text or token ids; a single prompt becomes a list of one. Raises InvalidRequest."""
    if isinstance(prompts, str | Mapping):
        return [as_prompt(prompts, name)]
    items = _items(prompts, name, f"{A_PROMPT}, or a list of these")
    if items and hasattr(items[0], "__index__") and not _is_list(items[0]):
        return [_token_ids(items, name)]
    return [as_prompt(each, f"{name}[{at}]") for at, each in enumerate(items)]


def as_prompt(prompt: Prompt, name: str = "prompt") -> ReadPrompt:
    """The text or the token ids of one prompt. Raises InvalidRequest."""
    if isinstance(prompt, str | WithImages):
        return prompt
    if not isinstance(prompt, Mapping):
        return _token_ids(_items(prompt, name, A_PROMPT), name)
    if "multi_modal_data" in prompt:
        return _with_media(prompt)
    if len(prompt) != 1 or not prompt.keys() <= {"prompt", "prompt_token_ids"}:
        keys = ", ".join(map(repr, prompt))
        remedy = "give a text, token ids, or one of prompt and prompt_token_ids"
        raise InvalidRequest(f"A prompt has the keys {keys}: {remedy}.", "prompt")
    key, value = next(iter(prompt.items()))
    if isinstance(value, str):
        return value
    return _token_ids(_items(value, key, "token ids" if key == "prompt_token_ids" else "a text"), key)


def _with_media(prompt: Mapping[str, Any]) -> WithImages:
    text, data = prompt.get("prompt"), prompt["multi_modal_data"]
    known = isinstance(data, Mapping) and data.keys() and data.keys() <= MARKS.keys()
    if not isinstance(text, str) or len(prompt) != 2 or not known:
        remedy = 'is {"prompt": a text, "multi_modal_data": {"image": ...}}, or has "video" or "audio" there'
        raise InvalidRequest(f"A prompt with multi_modal_data {remedy}.", "prompt")
    images, names = list[object](), list[str]()
    for kind, given in ((kind, data[kind]) for kind in MARKS if kind in data):
        each = list(given) if isinstance(given, list) or (isinstance(given, tuple) and kind == "image") else [given]
        images += map(AS[kind], each)
        names += [f"multi_modal_data['{kind}'][{at}]" for at in range(len(each))]
    return WithImages(text, images, tuple(names))


def as_params(params: ParamsChoice, count: int) -> list[SamplingParams | None]:
    """One for each of `count` prompts. Raises InvalidRequest."""
    name = "sampling_params"
    if params is None or isinstance(params, msgspec.Struct | Mapping):
        return [_params(params, name)] * count
    items = _items(params, name, f"{_SAMPLING}, or a list of these")
    if len(items) != count:
        raise InvalidRequest(f"There are {count} prompts and {len(items)} {name}: give one, or one for each.", name)
    made = {key: _params(each, f"{name}[{at}]") for at, (key, each) in enumerate({id(each): each for each in items}.items())}
    return [made[id(each)] for each in items]  # what is one stays one, and so does its grammar


def as_conversations(messages: Message | Sequence[Message] | Sequence[Sequence[Message]] | str) -> list[Conversation]:
    """Each conversation; a single conversation, or message, becomes a list of one. Raises InvalidRequest."""
    name = "messages"
    if isinstance(messages, Mapping):
        return [_conversation([messages], name)]
    if isinstance(messages, str):
        raise InvalidRequest(f"{name} is a text: give a list of {A_MESSAGE}, or use generate() for a text.", name)
    items = _items(messages, name, f"a list of {A_MESSAGE}, or a list of such lists")
    if not items or _is_list(items[0]):
        return [_conversation(each, f"{name}[{at}]") for at, each in enumerate(items)]
    return [_conversation(items, name)]


def as_conversation(messages: Message | Sequence[Message]) -> Conversation:
    """The one conversation. Raises InvalidRequest."""
    found = as_conversations(messages)
    if len(found) != 1:
        raise InvalidRequest(f"messages has {len(found)} conversations: give one, a list of {A_MESSAGE}.", "messages")
    return found[0]


def as_adapters(choice: AdapterChoice | Mapping[str, Any]) -> AdapterChoice:
    """One adapter for all prompts, or a list with one or None for each. Raises InvalidRequest."""
    name = "lora_request"
    if choice is None:
        return None
    if isinstance(choice, msgspec.Struct | Mapping):
        return as_struct(LoRARequest, choice, name)
    each = _items(choice, name, "LoRARequest(...), or a list with one or None for each prompt")
    return [one and as_struct(LoRARequest, one, f"{name}[{at}]") for at, one in enumerate(each)]


def as_count(value: int | None, name: str) -> int | None:
    """A whole number, or None. Raises InvalidRequest."""
    if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
        raise InvalidRequest(f"{name} is {kind_of(value)}: it must be a whole number.", name)
    return value


def as_variables(tools: Any, others: Any) -> dict[str, Any]:
    """The variables of a chat template. Raises InvalidRequest."""
    if tools is not None:
        tools = _items(tools, "tools", "a list of dictionaries")
        for at, tool in enumerate(tools):
            if not isinstance(tool, Mapping):
                raise InvalidRequest(f"tools[{at}] is {kind_of(tool)}: give a dictionary.", "tools")
    if not isinstance(others, Mapping | None):
        raise InvalidRequest(f"chat_template_kwargs is {kind_of(others)}: give a dictionary.", "chat_template_kwargs")
    return {"tools": tools, **(others or {})}


_SAMPLING = "SamplingParams(...), a dictionary of its fields or None"


def _params(params: Any, name: str) -> SamplingParams | None:
    if params is None:
        return None
    if not isinstance(params, SamplingParams | Mapping):
        raise InvalidRequest(f"{name} is {kind_of(params)}: give {_SAMPLING}.", "sampling_params")
    return as_struct(SamplingParams, params, name)


def _conversation(messages: Any, name: str) -> Conversation:
    found, images = _items(messages, name, f"a list of {A_MESSAGE}"), list[tuple[str, object]]()
    for at, message in enumerate(found):
        if not isinstance(message, Mapping):
            raise InvalidRequest(f"{name}[{at}] is {kind_of(message)}: give {A_MESSAGE}.", "messages")
        role, content = message.get("role"), message.get("content")
        if not isinstance(role, str):
            has = "no role" if role is None else f"{kind_of(role)} as its role"
            raise InvalidRequest(f"{name}[{at}] has {has}: give {A_MESSAGE}.", "messages")
        if not isinstance(content, str | list | tuple | None):
            raise InvalidRequest(f"{name}[{at}].content is {kind_of(content)}: give a text or a list of parts.", "messages")
        if isinstance(content, list | tuple):
            found[at] = {**message, "content": _content(content, f"{name}[{at}].content", images)}
    return Conversation(found, images)


def _content(parts: Sequence[object], name: str, images: list[tuple[str, object]]) -> str:
    """The text of a message's parts as the server makes it; its images go to `images`. Raises InvalidRequest."""
    found, is_behind_text = "", False
    for at, part in enumerate(parts):
        given = part if isinstance(part, Mapping) else {}
        kind = given.get("type")
        value = given.get(kind) if kind in ("text", *MEDIA) else None
        if value is None and kind in ("text", *MEDIA):
            raise InvalidRequest(f"{name}[{at}].{kind} is missing: it is required.", "messages")
        if (medium := MEDIA.get(str(kind))) is not None:
            content = value.get("url", f"data:;base64,{value.get('data')}") if isinstance(value, Mapping) else value
            images.append((f"{name}[{at}].{kind}", AS[medium](content)))
            found, is_behind_text = found + MARKS[medium], False
        elif isinstance(value, str):
            found, is_behind_text = found + ("\n" if is_behind_text else "") + value, True
        else:
            what = repr(kind) if kind is not None else kind_of(part)
            remedy = 'give {"type": "text", "text": ...}, or an image as "image_url", a sound as "input_audio"'
            raise InvalidRequest(f"{name}[{at}] is {what}: {remedy}.", "messages")
    return found


def of_each(make: Callable[..., Made], each: Sequence[tuple[object, ...]], what: str = "prompt") -> list[Made]:
    """What `make` makes of the arguments of each prompt. The InvalidRequest of one of several says which."""
    found = []
    for at, given in enumerate(each):
        try:
            found.append(make(*given))
        except InvalidRequest as error:
            if len(each) > 1:
                error.message = error.message.replace(f"The {what}", f"{what}s[{at}]", 1)
                error.args = (error.message,)
            raise
    return found


def _items(value: Any, name: str, remedy: str) -> list[Any]:
    """A list of what an iterable has: a list, an array of numpy, a tensor, an iterator."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, str | bytes | bytearray | memoryview | Mapping) or not isinstance(value, Iterable):
        raise InvalidRequest(f"{name} is {kind_of(value)}: give {remedy}.", name)
    return list(value)


def _is_list(value: Any) -> bool:
    return isinstance(value, Iterable) and not isinstance(value, str | Mapping)


def _token_ids(items: list[Any], name: str) -> list[int]:
    if all(type(each) is int for each in items):
        return items
    for at, each in enumerate(items):
        if isinstance(each, bool) or not hasattr(each, "__index__"):
            raise InvalidRequest(f"{name}[{at}] is {kind_of(each)}: token ids are whole numbers.", name)
    return list(map(index, items))
