"""Beam search for the APIs: a Generation whose answers are known only at its end.

Owns the translation of a body's fields and the sending of the search's requests; vnext/text/beams.py searches. A stream gets
each answer as one chunk.
"""

from __future__ import annotations

from contextlib import closing

import msgspec

from vnext.runtime.protocol.sampling_params import BeamSearchParams, InvalidRequest, SamplingParams, validate_beams
from vnext.server.answers.generation import Generation, Reader, Taker
from vnext.server.answers.resuming import EventIds, Replay
from vnext.server.call import Call
from vnext.server.context.openai_types import GenerationBody
from vnext.text.beams import BeamSearch, TranscriptSearch

HEEDED = {
    "n", "max_tokens", "temperature", "seed", "ignore_eos", "stop_token_ids", "logprobs", "include_stop_str_in_output",
    "skip_special_tokens",
}  # fmt: skip
"""Sampling parameters with a meaning in a beam search; temperature and seed change nothing, for it draws nothing."""


def generation_of(call: Call) -> Generation:
    """The generation that a call asks for. Raises as Generation."""
    return BeamGeneration(call) if call.asked.use_beam_search else Generation(call)


class BeamGeneration(Generation):
    """The n best of `beam_width` beams (n of them unless the body says how many) for each prompt."""

    def __init__(self, call: Call) -> None:
        asked, params = call.asked, call.params
        _check_heeded(asked)
        super().__init__(call)
        width = params.n if asked.beam_width is None else asked.beam_width
        if width < params.n:
            raise InvalidRequest(f"beam_width is {width}: it must be at least n, which is {params.n}.", "beam_width")
        self._searches = list[BeamSearch]()
        for request in self._requests[:: params.n]:
            search = BeamSearchParams(
                beam_width=width,
                max_tokens=request.sampling.max_tokens,
                length_penalty=1.0 if asked.length_penalty is None else asked.length_penalty,
            )
            validate_beams(search)
            ends = call.context.end_tokens(params)
            given, salt = (request.name, request.prompt, search, ends), request.cache_salt
            rules = request.sampling.constraint
            made = BeamSearch(*given, request.priority, salt) if rules is None else TranscriptSearch(*given, salt, rules)
            self._searches.append(made)

    async def answer(self, reader: Reader, ids: EventIds | None = None) -> None:
        """As Generation.answer; the reader gets each answer as one delta."""
        async with self._held():
            while requests := {each.name: (each, search) for search in self._searches for each in search.requests()}:
                whose = {"adapter": self._adapter, "client": self._requests[0].client, "weight": self._requests[0].weight}
                each = [msgspec.structs.replace(request, **whose) for request, _ in requests.values()]
                with closing(self.call.context.client.submit_all(each)) as stream:
                    async for output in stream:
                        requests[output.name][1].push(output)
            found = [output for search in self._searches for output in search.best(self.call.params.n)]
            taker = Taker(self, reader, ids is not None and ids.by_token)
            replay = taker if ids is None else Replay(taker, ids)
            for choice, output in zip(self.choices, found, strict=True):
                if not replay.take(choice, output):
                    await reader.room()


def _check_heeded(body: GenerationBody) -> None:
    for name, default in msgspec.structs.asdict(SamplingParams()).items():
        value = getattr(body, name, None)
        if name not in HEEDED and value is not None and value != default:
            raise InvalidRequest(f"use_beam_search cannot be combined with {name}: leave one out.", name)
