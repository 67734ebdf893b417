"""Encode: a request whose images and sounds an engine encodes that does nothing else, before another one computes the request.

The vectors get there by content address: as files that engines of one server share, under the digests of the inputs, which the
prompt says. So an answer does not depend on this: the engine that computes the request encodes what it does not find. It gets the
request when the vectors are there, when the encoding engine ends or refuses, and after PATIENCE_S at the latest.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import numpy as np
from msgspec.structs import replace

from vnext.runtime.client.client import EngineClient
from vnext.runtime.client.output_stream import EngineDead, LiveRequest, OutputStream, Refused
from vnext.runtime.protocol.messages import RequestOutput, SubmitRequest
from vnext.state.events import pack_tokens, unpack_tokens
from vnext.state.params import NO_POOLING, Sampling
from vnext.state.store.inputs import digest_at, has_inputs, inputs_in

PATIENCE_S = 30.0
BEHIND = 0
"""A token behind inputs, so that a prompt of them has a text."""
GoOn = Callable[[LiveRequest], None]


def of_inputs(request: SubmitRequest) -> SubmitRequest:
    """The request that only encodes the inputs of another one's prompt."""
    known = unpack_tokens(request.prompt)
    inputs = [known[each.start : each.start + each.length] for each in inputs_in(known)]
    prompt = pack_tokens(np.concatenate((*inputs, np.array([BEHIND], np.int32))))
    sampling = Sampling(seed=0, max_tokens=1, temperature=0.0)
    return replace(request, prompt=prompt, sampling=sampling, adapter=None, has_seed=True, encodes=True)


class Encode(OutputStream):
    """What stands for the stream of `live` while its inputs are encoded; `go_on` gets it when they are, or will not be."""

    def __init__(self, live: LiveRequest, go_on: GoOn, late: Callable[[str], None]) -> None:
        """`late`: ends the encoding of the request of this name."""
        super().__init__({live.request.name}, lambda names, reason: None)
        self._original, self._go_on = live, go_on
        self._timer = asyncio.get_running_loop().call_later(PATIENCE_S, self._give_up, late)

    def request(self) -> LiveRequest:
        return LiveRequest(of_inputs(self._original.request), self)

    def given_back(self) -> LiveRequest:
        """The original request, which waits for nothing more."""
        self._timer.cancel()
        self._original.is_encoded = True
        return self._original

    def put(self, output: RequestOutput) -> None:
        if output.finish == "abort" and not output.error:
            self.given_back().stream.put(output)
        elif output.finish:
            self._go_on(self.given_back())

    def put_token(self, name: str, token: int) -> None:
        """The one token comes with the end."""

    def fail(self, error: EngineDead | Refused) -> None:
        self._go_on(self.given_back())

    def _give_up(self, late: Callable[[str], None]) -> None:
        if (name := self._original.request.name) in self._original.stream.live:  # else its client has left
            late(name)
            self._go_on(self.given_back())


class Encoders:
    """The engines that encode for others."""

    def __init__(self, clients: Sequence[EngineClient]) -> None:
        self._clients = tuple(clients)

    def take(self, live: LiveRequest, go_on: GoOn) -> bool:
        """Whether one of them encodes the inputs of a request, which `go_on` gets then. The same inputs go to the same one."""
        request, able = live.request, [each for each in self._clients if each.is_up and each.trouble is None]
        is_done = live.is_encoded or request.deaths or request.sampling.pooling != NO_POOLING
        if not able or is_done or not has_inputs(request.prompt):
            return False
        known = unpack_tokens(request.prompt)
        client = able[int.from_bytes(digest_at(known, inputs_in(known)[0].start)[:4], "little") % len(able)]
        client.take(Encode(live, go_on, lambda name: client.drop([name], "client")).request())
        return True

    def lost(self) -> list[LiveRequest]:
        """The requests of those that have ended."""
        return [live for client in self._clients if not client.is_up for live in client.release(2**62)]
