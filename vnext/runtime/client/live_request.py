"""LiveRequest: what a client must know of a request to have another engine core go on with it."""

from __future__ import annotations

from array import array

from msgspec.structs import replace

from vnext.runtime.client.output_stream import OutputStream
from vnext.runtime.protocol.messages import RequestOutput, SubmitRequest, derived_seed


class LiveRequest:
    """A request whose last output has not arrived. `tokens` (int32) are those that have; `number` is its number in the engine core
    that has it, -1 before its first output. `is_encoded`: no other engine is asked for its inputs. `prefilled`: the output of the
    engine that has computed its prompt for that one, None without one."""

    __slots__ = ("_is_repeated", "_known", "_was_heard", "is_encoded", "number", "prefilled", "request", "stream", "tokens")

    def __init__(self, request: SubmitRequest, stream: OutputStream) -> None:
        self.request, self.stream = request, stream
        self.tokens = array("i")
        self.number = -1
        self.prefilled: RequestOutput | None = None
        self._known = 0  # tokens when it was submitted
        self._was_heard = self._is_repeated = self.is_encoded = False

    def lose(self, root_seed: int) -> None:
        """The engine core that had it has ended. A request that has had an output keeps the key that `root_seed` gave it."""
        has_new = len(self.tokens) > self._known
        changes = {"deaths": 1 if has_new else self.request.deaths + 1, "generated": self.tokens.tobytes()}
        if self.number >= 0 and not self.request.has_seed:
            seed = derived_seed(root_seed, self.number)
            changes |= {"sampling": replace(self.request.sampling, seed=seed), "has_seed": True}
        self.request = replace(self.request, **changes)
        self._known, self.number, self._is_repeated = len(self.tokens), -1, self._was_heard

    def take(self, output: RequestOutput) -> RequestOutput:
        """Take in an output; returns what is new of it. What a request's first outputs report comes again from another engine
        core: the wait, the tokens found in the cache and, if there are tokens behind it, the prompt's results. Experts, which come
        with every token, may repeat."""
        self.tokens.frombytes(output.tokens)
        if self.prefilled is not None and not self._was_heard:
            waited_s = output.queue_seconds + self.prefilled.queue_seconds
            output = replace(output, cached_tokens=self.prefilled.cached_tokens, queue_seconds=waited_s)
        self._was_heard = True
        if not self._is_repeated:
            return output
        prompt = tuple(part for part in output.prompt if part.experts or not self._known)
        return replace(output, queue_seconds=0.0, cached_tokens=0, prompt=prompt, missed=None)
