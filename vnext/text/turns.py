"""Turns: which orders of roles a chat template takes, and messages brought into one that it does.

Many templates want a system's message first, users and the assistant in turns, one call at a time or ids of nine characters, as
their model was trained; the APIs take anything. What a template takes is tried once. Only what it refuses, drops, or shows as
another role's words is rearranged.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

Message = dict[str, Any]
Render = Callable[[list[Message]], str | None]
"""A conversation's text, None where the template refuses it."""
_BETWEEN = "\n\n"
_SYSTEMS = ("system", "developer")
_IDS = ("call12345", "call67890")  # of the nine letters and digits that Mistral's templates ask for
_NOTHING: Message = {"role": "assistant", "content": ""}
_LONG_ID = "call_0123456789abcdef"


class Turns(NamedTuple):
    """What a template takes: a `system` message at the beginning, a `late_system` one elsewhere, `neighbours` of one role, a
    user's `words_after_result` of a tool, `several_calls` in a message, and `any_id` of a call."""

    system: bool = True
    late_system: bool = True
    neighbours: bool = True
    words_after_result: bool = True
    several_calls: bool = True
    any_id: bool = True


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
        several_calls=not knows_results or _takes(render, "user", "calls", "tool", "tool"),
        any_id=not knows_results or _takes(render, "user", "long call", "long tool"),
    )


def arranged(messages: Sequence[Message], turns: Turns) -> list[Message]:
    """The messages in an order that the template takes, with all their words."""
    found = list(messages) if turns.late_system else _lifted(messages)
    if not turns.system:
        found = _without_system(found)
    if not turns.any_id:
        found = list(map(_with_short_ids, found))
    if not turns.several_calls:
        found = _one_call_each(found)
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
    is_whole = text is not None and all(word in text for role, word in zip(roles, words) if "call" not in role)
    return text if is_whole else None


def _probe(role: str, word: str) -> Message:
    """A message of a role; "call" and "calls" are an assistant's, "long" ones have an id as OpenAI's."""
    ids = {"calls": _IDS, "long call": (_LONG_ID,), "long tool": (_LONG_ID,)}.get(role, _IDS[:1])
    if "call" in role:
        function = {"name": "probe", "arguments": {}}
        return _NOTHING | {"tool_calls": [{"id": id_, "type": "function", "function": function} for id_ in ids]}
    if "tool" in role:
        return {"role": "tool", "content": word, "tool_call_id": ids[0], "name": "probe"}
    return {"role": role, "content": word}


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


def _with_short_ids(message: Message) -> Message:
    """The message with ids of nine letters and digits. Those of this server are such; other servers' are hashed."""
    changed = dict(message)
    if message.get("tool_call_id"):
        changed["tool_call_id"] = _short(message["tool_call_id"])
    if message.get("tool_calls"):
        changed["tool_calls"] = [call | {"id": _short(call["id"])} if call.get("id") else call for call in message["tool_calls"]]
    return changed


def _short(id_: str) -> str:
    return id_ if re.fullmatch("[a-zA-Z0-9]{9}", id_) else hashlib.blake2b(id_.encode(), digest_size=5).hexdigest()[:9]


def _one_call_each(messages: Sequence[Message]) -> list[Message]:
    """Calls of one message in messages of their own, each with its result behind it."""
    found: list[Message] = []
    for message in messages:
        calls = message.get("tool_calls") or ()
        if message["role"] == "tool":
            found.insert(_behind_its_call(found, message.get("tool_call_id")), message)
        elif len(calls) < 2:
            found.append(message)
        else:
            found += [(message if place == 0 else _NOTHING) | {"tool_calls": [call]} for place, call in enumerate(calls)]
    return found


def _behind_its_call(found: Sequence[Message], id_: str | None) -> int:
    """Where the result of the call belongs: behind the last call of that id, if only calls and results follow, else at the end."""
    for at in range(len(found) - 1, -1, -1):
        calls = found[at].get("tool_calls") or ()
        if any(call.get("id") == id_ for call in calls):
            return at + 1
        if not calls and found[at]["role"] != "tool":
            break
    return len(found)


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
