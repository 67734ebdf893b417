"""Streams: what the clients of a simulation have of their answers, whichever engine gave it to them.

An engine core dies and its clients live on. Each has the tokens that it was sent, perhaps without those of the engine's last
moment, and asks another engine to go on behind them. Owns what is known of each client, and that every answer is right.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from tests.sim.scenario import Scenario
from vnext.sim.checks.accounting import Entry
from vnext.sim.checks.plain_state import Divergence
from vnext.sim.rng import Rng
from vnext.sim.toy import Answer, answer
from vnext.state.events import AnyEvent
from vnext.state.outputs import Output
from vnext.state.state import State

LOST_PERCENT = 50
"""Of clients that have not heard what an engine said in the moment of its death."""


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a simulation: the log and the last state of its (last) engine, each client's stream by its number, and its
    duration in virtual time."""

    events: tuple[AnyEvent, ...]
    state: State
    answers: dict[int, Answer]
    refused: int
    duration_us: int


class Streams:
    """All clients, by their numbers in the scenario. Mutable.

    `ids` are the requests of those that the present engine knows, `left` those that have gone away, `failed` those whose
    constraints ranks could not follow, `waiting` the tokens of those that the present engine does not know yet, and
    `answers` what others got from engines that have died.
    """

    def __init__(self, scenario: Scenario) -> None:
        self._scenario = scenario
        self.ids: dict[int, int] = {}
        self.left: set[int] = set()
        self.failed: set[int] = set()
        self.waiting: dict[int, list[int]] = {}
        self.answers: dict[int, Answer] = {}
        self._numbers: dict[int, int] = {}
        self._unsent: dict[int, int] = {}

    def begin(self, number: int, id_: int) -> None:
        """The present engine has taken this client's request. Raises Divergence for one that an engine before had of a client that
        has left since."""
        if number in self.left and number in self.waiting:
            raise Divergence(f"C5: client {number} has left, and its request goes on in another engine")
        self.ids[number], self._numbers[id_] = id_, number
        self.waiting.pop(number, None)

    def number(self, id_: int) -> int:
        return self._numbers[id_]

    def leave(self, number: int) -> None:
        """A client goes away. If no engine knows it now, none ever will."""
        self.left.add(number)
        if number in self.waiting:
            self.answers[number] = Answer(tuple(self.waiting.pop(number)), "abort")

    def hear(self, entries: Mapping[int, Entry], news: Sequence[Output]) -> None:
        """News that are sent at the end of the moment, if the engine lives so long."""
        for output in news:
            before = len(entries[output.id].tokens) - sum(other.id == output.id and other.token >= 0 for other in news)
            self._unsent.setdefault(self._numbers[output.id], before)

    def sent(self) -> None:
        """The moment is over: everybody has heard its news."""
        self._unsent.clear()

    def lose_engine(self, entries: Mapping[int, Entry], rng: Rng) -> None:
        """The engine has died with all that it knew (`entries`); who has no answer waits for another engine."""
        for number, id_ in self.ids.items():
            entry, tokens = entries[id_], entries[id_].tokens
            is_over = bool(entry.finish)
            if number in self._unsent and rng.happens(LOST_PERCENT):
                tokens, is_over = tokens[: self._unsent[number]], False
            if is_over or number in self.left:
                self.answers[number] = Answer(tuple(tokens), entry.finish if is_over else "abort")
            else:
                self.waiting[number] = list(tokens)
                self.failed.discard(number)
        self.ids, self._numbers, self._unsent = {}, {}, {}

    def all_answers(self, entries: Mapping[int, Entry]) -> dict[int, Answer]:
        """Every client's answer: those of engines that have died, and those of the present one."""
        present = {number: Answer(tuple(entries[id_].tokens), entries[id_].finish) for number, id_ in self.ids.items()}
        return dict(sorted((self.answers | present).items()))

    def require_right(self, entries: Mapping[int, Entry]) -> None:
        """P2, A3, Y3, C5: every stream equals the model's answer to that request alone, or its beginning if aborted."""
        if self.waiting:
            raise Divergence(f"C5: clients {sorted(self.waiting)} are forgotten")
        for number, got in self.all_answers(entries).items():
            client = self._scenario.clients[number]
            right = answer(self._scenario.config, list(client.prompt), client.sampling)
            if got.finish == "abort" and number not in self.failed:
                right = Answer(right.tokens[: len(got.tokens)], "abort")
            if got != right:
                raise Divergence(f"client {number} was answered {got} where alone it gets {right}")
