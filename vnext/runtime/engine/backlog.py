"""Backlog: messages for a client that does not read at present, merged to take no more room than necessary.

Owns the merging: one entry for each of the client's live requests, and the latest statistics. A client that is stopped for an
hour loses nothing, delays no other client and costs four bytes a token.
"""

from __future__ import annotations

from collections import defaultdict

import numpy as np

from vnext.runtime.protocol.merged_output import MergedOutput
from vnext.runtime.protocol.messages import EngineMessage, EngineStats, Outputs

TOKEN_BYTES = 4


class Backlog:
    """Messages of one client, merged. Mutable."""

    def __init__(self) -> None:
        self._outputs: defaultdict[int, MergedOutput] = defaultdict(MergedOutput)  # by request number
        self._names: dict[int, str] = {}  # of requests in this backlog; the client knows the others by number
        self._others: list[EngineMessage] = []
        self._stats: EngineStats | None = None

    def add(self, message: EngineMessage) -> None:
        """Merge one more message."""
        match message:
            case Outputs():
                for place, number in enumerate(memoryview(message.numbers).cast("q")):
                    self._outputs[number].tokens += message.tokens[TOKEN_BYTES * place :][:TOKEN_BYTES]
                for output in message.outputs:
                    self._names[output.number] = output.name
                    self._outputs[output.number].add(output)
            case EngineStats():
                self._stats = message
            case _:
                self._others.append(message)

    def messages(self) -> list[EngineMessage]:
        """The messages for a client that reads again: each request's outputs in order, and EngineDied last."""
        reported = [self._merged()] if self._outputs else []
        return [*reported, *([] if self._stats is None else [self._stats]), *self._others]

    def _merged(self) -> Outputs:
        named = tuple(self._outputs[number].merged(name, number) for number, name in self._names.items())
        going = {number: output.tokens for number, output in self._outputs.items() if number not in self._names}
        counts = [len(tokens) // TOKEN_BYTES for tokens in going.values()]
        numbers = np.repeat(np.array(list(going), dtype=np.int64), counts)
        return Outputs(outputs=named, numbers=numbers.tobytes(), tokens=b"".join(going.values()))
