"""Turns: which orders of roles a chat template takes, and messages brought into one that it does.

Many templates want a system's message first, or users and the assistant in turns, as their model was trained; the APIs take any
order. What a template takes is tried once. Only what it refuses, drops, or shows as another role's words is rearranged.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

Message = dict[str, Any]
Render = Callable[[list[Message]], str | None]
"""A conversation's text, None where the template refuses it."""
_BETWEEN = "\n\n"
_SYSTEMS = ("system", "developer")
_ID = "call12345"  # of the nine letters and digits that Mistral's templates ask for


class Turns(NamedTuple):
    """What a template takes: a `system` message at the beginning, a `late_system` one elsewhere, `neighbours` of one role, and a
    user's `words_after_result` of a tool."""

    system: bool = True
    late_system: bool = True
    neighbours: bool = True
    words_after_result: bool = True


def turns_of(render: Render) -> Turns:
    """What the template takes. One that refuses even a user's message is left to refuse the rest itself."""
    if not _takes(render, "user"):
        return Turns()
    roles = ("system", "assistant", "user")
    late, as_assistant, as_user = (_shown(render, "user", "assistant", "user", role, "user") for role in roles)
    is_late = late is not None and (late != as_assistant or late == as_user)  # all equal: the template shows no roles
    neighbours = _takes(render, "user", "user") and _takes(render, "user", "assistant", "assistant", "user")
    knows_results = _takes(render, "user", "call", "tool")
    return Turns(
        system=_takes(render, "system", "user"),
        late_system=is_late and _takes(render, "system", "system", "user"),
        neighbours=neighbours,
        words_after_result=not knows_results or _takes(render, "user", "call", "tool", "user"),
    )


def arranged(messages: Sequence[Message], turns: Turns) -> list[Message]:
    """The messages in an order that the template takes, with all their words."""
    found = list(messages) if turns.late_system else _lifted(messages)
    if not turns.system:
        found = _without_system(found)
    if not turns.words_after_result:
        found = _joined(found, lambda last, each: (last["role"], each["role"]) == ("tool", "user"))
    if not turns.neighbours:
        found = _joined(found, lambda last, each: last["role"] == each["role"] in ("user", "assistant"))
    return found


def _takes(render: Render, *roles: str) -> bool:
    return _shown(render, *roles) is not None


def _shown(render: Render, *roles: str) -> str | None:
    """The text of a conversation of these roles, None where the template refuses it or drops words of it."""
    words = [f"word{place}" for place in range(len(roles))]
    text = render([_probe(role, word) for role, word in zip(roles, words, strict=True)])
    is_whole = text is not None and all(word in text for role, word in zip(roles, words) if role != "call")
    return text if is_whole else None


def _probe(role: str, word: str) -> Message:
    if role == "call":
        function = {"name": "probe", "arguments": {}}
        return {"role": "assistant", "content": "", "tool_calls": [{"id": _ID, "type": "function", "function": function}]}
    return {"role": role, "content": word} | ({"tool_call_id": _ID, "name": "probe"} if role == "tool" else {})


def _lifted(messages: Sequence[Message]) -> list[Message]:
    """All words of systems in one message at the beginning."""
    systems = [each for each in messages if each["role"] in _SYSTEMS]
    if not systems or (len(systems) == 1 and messages[0] is systems[0]):
        return list(messages)
    others = [each for each in messages if each["role"] not in _SYSTEMS]
    return [systems[0] | {"content": _words(systems)}, *others]


def _without_system(messages: list[Message]) -> list[Message]:
    """Words of a system at the beginning go before the first words of the user."""
    if not messages or messages[0]["role"] not in _SYSTEMS:
        return messages
    system, *others = messages
    if not others or others[0]["role"] != "user":
        return [{"role": "user", "content": system["content"]}, *others]
    return [others[0] | {"content": _words([system, others[0]])}, *others[1:]]


def _joined(messages: Sequence[Message], belongs: Callable[[Message, Message], bool]) -> list[Message]:
    """Each message in the one before it that it belongs to."""
    found: list[Message] = []
    for each in messages:
        if found and belongs(found[-1], each):
            found[-1] = _both(found[-1], each)
        else:
            found.append(each)
    return found


def _both(one: Message, other: Message) -> Message:
    """The first message with the other's words and calls too."""
    lists = {name: [*one.get(name, ()), *other[name]] for name in ("tool_calls",) if other.get(name)}
    texts = {
        name: _BETWEEN.join(filter(None, (one.get(name), value)))
        for name, value in other.items()
        if name not in ("role", "name", "tool_call_id") and isinstance(value, str)
    }
    return one | texts | lists


def _words(messages: Sequence[Message]) -> str:
    return _BETWEEN.join(each["content"] for each in messages if each["content"])
