"""Prefill: a request whose prompt another engine computes first, as the streams of clients see that engine's answer.

The engine of the prompt samples one token, which nobody reads: the engine of the answer computes the last tokens of the prompt
itself, behind the blocks that it gets, and samples that token again. So an answer comes from one engine alone, whatever becomes of
the blocks.
"""

from __future__ import annotations

from collections.abc import Callable

from msgspec.structs import replace

from vnext.runtime.client.live_request import LiveRequest
from vnext.runtime.client.output_stream import OutputStream
from vnext.runtime.protocol.messages import RequestOutput, SubmitRequest
from vnext.state.params import NO_POOLING, Sampling, reads_cache


def is_worth(request: SubmitRequest, block_size: int) -> bool:
    """Whether another engine could use blocks of this prompt: it has a full one before its last token. A request that an engine has
    lost goes on where its tokens are computed."""
    has_block, sampling = len(request.prompt) // 4 > block_size, request.sampling
    return has_block and not request.deaths and not request.ticket and reads_cache(sampling) and sampling.pooling == NO_POOLING


class Prefill(OutputStream):
    """What stands for the stream of `live` while its prompt is computed; `go_on` gets it, with the ticket, when that is done."""

    def __init__(self, live: LiveRequest, go_on: Callable[[LiveRequest], None]) -> None:
        super().__init__({live.request.name}, lambda names, reason: None)
        self._original, self._go_on = live, go_on

    def request(self) -> LiveRequest:
        """The request of the prompt."""
        own = self._original.request
        sampling = Sampling(seed=0, max_tokens=1, temperature=0.0)
        return LiveRequest(replace(own, sampling=sampling, has_seed=True, hands_over=True), self)

    def given_back(self, deaths: int) -> LiveRequest:
        """The original request, to be computed without a hand-over because `deaths` engine cores in a row have ended with it."""
        self._original.request = replace(self._original.request, deaths=deaths)
        return self._original

    def put(self, output: RequestOutput) -> None:
        if output.finish == "abort":
            self._original.stream.put(output)
        elif output.finish:
            self._original.prefilled = output
            self._original.request = replace(self._original.request, ticket=output.ticket)
            self._go_on(self._original)

    def put_token(self, name: str, token: int) -> None:
        """The one token comes with the end."""

    def fail(self, error: Exception) -> None:
        self._original.stream.fail(error)
