"""Beam search: the likeliest answers to a prompt, found by requests of one token each over the engine's prefix cache.

Owns which beams go on and which answers win; sends nothing, so that the API server and the library share it. Each step asks
the engine for the likeliest next tokens of every live beam. A score is the sum of an answer's log-probabilities, by the
model's own logits, over (tokens of prompt and answer) ** length_penalty, as in vLLM. Equal scores keep their order. A transcript
is searched as in Whisper's decoding.py: its length alone counts, and what has ended is an answer only while it is likelier than
what goes on.
"""

from __future__ import annotations

from collections.abc import Collection
from math import isfinite
from operator import attrgetter
from typing import NamedTuple

from msgspec.structs import replace

from vnext.runtime.protocol.messages import RequestOutput, SubmitRequest, TokenLogprobs
from vnext.runtime.protocol.sampling_params import BeamSearchParams
from vnext.state.events import pack_tokens
from vnext.state.params import Constraint, Sampling

CANDIDATES = 2
"""Likeliest tokens asked for, per beam: even if half of them end answers, enough beams go on."""


class Beam(NamedTuple):
    """An answer in progress. `end` is the token that ended it, -1 while it goes on; `logprob` sums over all tokens."""

    tokens: tuple[int, ...] = ()
    logprob: float = 0.0
    reported: tuple[TokenLogprobs, ...] = ()
    end: int = -1


class BeamSearch:
    """The search for one prompt. While `requests` gives some, send them and `push` each one's output. Mutable."""

    def __init__(
        self, name: str, prompt: bytes, params: BeamSearchParams, ends: Collection[int], priority: int = 0, cache_salt: str = "",
    ) -> None:  # fmt: skip
        """`name` begins the requests' names. `prompt`: as a request has it. `ends`: the tokens that end an answer."""
        self.cached_tokens = 0
        self._name, self._params, self._ends = name, params, ends
        self._prompt, self._prompt_length = prompt, len(prompt) // 4
        self._priority, self._cache_salt = priority, cache_salt
        self._sampling = Sampling(
            seed=0, max_tokens=1, temperature=0.0, logprobs=CANDIDATES * params.beam_width, ignore_eos=True
        )
        self._live, self._ended = [Beam()], list[Beam]()
        self._steps = 0
        self._outputs: dict[str, RequestOutput] = {}
        self._is_aborted = False

    def requests(self) -> list[SubmitRequest]:
        """The next step's requests, one for each live beam; none once the search is over."""
        if self._outputs:
            self._step()
        if self._is_aborted or self._steps == self._params.max_tokens or self._is_decided():
            return []
        return [
            SubmitRequest(
                name=f"{self._name}-{self._steps}.{place}",
                prompt=self._prompt + pack_tokens(beam.tokens),
                sampling=self._sampling_of(beam),
                priority=self._priority,
                cache_salt=self._cache_salt,
            )
            for place, beam in enumerate(self._live)
        ]

    def push(self, output: RequestOutput) -> None:
        """Take in the whole output of one of the requests."""
        self._outputs[output.name] = output
        self._is_aborted |= output.finish == "abort"
        if self._steps == 0:
            self.cached_tokens = output.cached_tokens

    def best(self, count: int) -> list[RequestOutput]:
        """The `count` best answers, the best first, as an engine would report them."""
        found = sorted([*self._ended, *self._live], key=self._score, reverse=True)[:count]
        return [self._output(beam) for beam in found + found[-1:] * (count - len(found))]

    def _step(self) -> None:
        """Extend every live beam by its likeliest tokens and keep the best; an ended one waits for the result."""
        came, self._outputs = self._outputs, {}
        if self._is_aborted:
            return
        outputs = [came[f"{self._name}-{self._steps}.{place}"] for place in range(len(self._live))]
        self._steps += 1
        grown = [
            Beam((*beam.tokens, token), beam.logprob + logprob, (*beam.reported, _chosen(output, logprob, rank)), self._end(token))
            for beam, output in zip(self._live, outputs)
            for rank, (token, logprob) in enumerate(output.logprobs[0].top)
        ]
        self._keep(grown)

    def _keep(self, grown: list[Beam]) -> None:
        self._ended += [beam for beam in grown if beam.end >= 0]
        going = sorted((beam for beam in grown if beam.end < 0), key=self._score, reverse=True)
        self._live = going[: self._params.beam_width]

    def _sampling_of(self, beam: Beam) -> Sampling:
        """The parameters of the request for what comes behind a beam."""
        return self._sampling

    def _is_decided(self) -> bool:
        """Whether no live beam can still be among the best: its sum only falls, and its length has a bound."""
        if len(self._ended) < self._params.beam_width:
            return not self._live
        worst = sorted(map(self._score, self._ended), reverse=True)[self._params.beam_width - 1]
        length = self._prompt_length + (self._params.max_tokens if self._params.length_penalty > 0 else self._steps)
        return all(beam.logprob / length**self._params.length_penalty <= worst for beam in self._live)

    def _end(self, token: int) -> int:
        return token if token in self._ends else -1

    def _score(self, beam: Beam) -> float:
        length = self._prompt_length + len(beam.tokens) - (beam.end >= 0)
        return beam.logprob / float(length**self._params.length_penalty)

    def _output(self, beam: Beam) -> RequestOutput:
        return RequestOutput(
            name=self._name,
            tokens=pack_tokens(beam.tokens),
            finish="abort" if self._is_aborted else "stop" if beam.end >= 0 else "length",
            stop_token=beam.end,
            cached_tokens=self.cached_tokens,
            logprobs=beam.reported,
        )


class TranscriptSearch(BeamSearch):
    """The search for the transcript of a sound, which keeps to `rules` and judges by what these allow."""

    def __init__(
        self, name: str, prompt: bytes, params: BeamSearchParams, ends: Collection[int], cache_salt: str, rules: Constraint
    ) -> None:
        """As BeamSearch. `rules`: as of one answer."""
        super().__init__(name, prompt, params, ends, cache_salt=cache_salt)
        self._rules = rules

    def _sampling_of(self, beam: Beam) -> Sampling:
        return replace(self._sampling, constraint=replace(self._rules, begun=beam.tokens))

    def _keep(self, grown: list[Beam]) -> None:
        """The best go on; those that have ended are kept among them, until there are enough."""
        live = list[Beam]()
        for beam in sorted((beam for beam in grown if isfinite(beam.logprob)), key=attrgetter("logprob"), reverse=True):
            if len(live) < self._params.beam_width:
                (live if beam.end < 0 else self._ended).append(beam)
        del self._ended[self._params.beam_width :]
        self._live = live if len(self._ended) < self._params.beam_width else []

    def _score(self, beam: Beam) -> float:
        return beam.logprob / float(max(1, len(beam.tokens) - (beam.end >= 0)) ** self._params.length_penalty)


def _chosen(output: RequestOutput, logprob: float, rank: int) -> TokenLogprobs:
    return TokenLogprobs(logprob=logprob, rank=rank, top=output.logprobs[0].top)
