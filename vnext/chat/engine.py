"""The other side of `vnext chat` without a server: an engine that lives as long as the talk."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import msgspec

from vnext.chat.talker import Messages, TalkFailed, TalkRefused, sampling_options
from vnext.llm import LLM
from vnext.options import ChatCommand
from vnext.runtime.children import ChildDied
from vnext.runtime.launch import StartFailed, StartRefused
from vnext.runtime.output_stream import EngineDead, Refused
from vnext.sampling_params import InvalidRequest, SamplingParams
from vnext.server.text.files import CheckpointUnreadable


class EngineTalker:
    """An LLM as a talker."""

    def __init__(self, llm: LLM, title: str, params: SamplingParams) -> None:
        self._llm = llm
        self._params = params
        self.title = title

    def answer(self, messages: Messages) -> Iterator[str]:
        try:
            yield from self._llm.stream_chat(messages, self._params)
        except (InvalidRequest, Refused, EngineDead) as error:
            raise TalkFailed(str(error)) from error


@contextmanager
def start_engine_talker(command: ChatCommand) -> Iterator[EngineTalker]:
    """Start an engine for this talk. Raises TalkFailed, TalkRefused."""
    options = {"max_tokens": None} | sampling_options(command)
    try:
        llm = LLM(**msgspec.structs.asdict(command.engine))
    except (StartRefused, CheckpointUnreadable) as error:
        raise TalkRefused(str(error)) from error
    except (StartFailed, ChildDied, EngineDead) as error:
        raise TalkFailed(str(error)) from error
    with llm:
        yield EngineTalker(llm, command.engine.model or "the demo model", SamplingParams(**options))
