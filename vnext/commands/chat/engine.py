"""EngineTalker: the model side of `vnext chat` without a server, an engine that lives as long as the chat."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from contextlib import contextmanager

from msgspec.structs import asdict, replace

from vnext.api.llm import LLM
from vnext.commands.chat.talker import TOO_LONG, Messages, Sampling, TalkFailed, TalkRefused, TalkTooLong
from vnext.options.reader import ChatCommand
from vnext.runtime.client.output_stream import EngineDead, Refused
from vnext.runtime.processes.launch import StartFailed, StartRefused
from vnext.runtime.processes.subprocesses import ChildDied
from vnext.runtime.protocol.sampling_params import InvalidRequest
from vnext.text.files import CheckpointUnreadable


class EngineTalker:
    """An LLM as a talker."""

    def __init__(self, llm: LLM, title: str, context: int = 0) -> None:
        self._llm = llm
        self.title, self.context = title, context

    def answer(self, messages: Messages, sampling: Sampling) -> Generator[str, None, int]:
        try:
            params = replace(self._llm.get_default_sampling_params(), **({"max_tokens": None} | sampling))
            return (yield from self._llm.stream_chat(messages, params))
        except (InvalidRequest, Refused, EngineDead) as error:
            raise (TalkTooLong if getattr(error, "code", None) == TOO_LONG else TalkFailed)(str(error)) from error


@contextmanager
def start_engine_talker(command: ChatCommand) -> Iterator[EngineTalker]:
    """Start an engine for this chat. Raises TalkFailed, TalkRefused."""
    try:
        llm = LLM(**asdict(command.engine))
    except (StartRefused, CheckpointUnreadable) as error:
        raise TalkRefused(str(error)) from error
    except (StartFailed, ChildDied, EngineDead) as error:
        raise TalkFailed(str(error)) from error
    with llm:
        yield EngineTalker(llm, command.engine.model or "the demo model", llm.ready.config.max_model_len)
