"""Engines: the exact views of one server, one for each of its engines, as one replica to the policies.

A server with several engines chooses among them itself, by the same rule. So its candidate is that of the engine which the rule
names, and a request is on its way to that one until any of them has it.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from vnext.routing.policies import DEFAULT_POLICY, HIT_WEIGHT, Arriving, Candidate, route
from vnext.routing.prompts import Prompt
from vnext.routing.view import View


class EngineViews:
    """Mutable. `views` has one for each engine, at its number."""

    def __init__(self, count: int = 1) -> None:
        self.views: Sequence[View] = [View() for _ in range(count)]
        if count > 1:
            for number, view in enumerate(self.views):
                view.heard = partial(self._arrived, number)

    @property
    def is_exact(self) -> bool:
        """Whether every engine's state is known."""
        return all(view.is_exact for view in self.views)

    def begin_again(self) -> None:
        """New streams follow."""
        for view in self.views:
            view.begin_again()

    def candidate(self, prompt: Prompt, is_ready: bool) -> Candidate:
        """What a policy may know of the server."""
        return self._chosen(prompt, is_ready)[1]

    def routed(self, name: str, prompt: Prompt) -> None:
        """As View.routed, for the engine that the server chooses, as far as one can say from here."""
        self._chosen(prompt, True)[0].routed(name, prompt)

    def done(self, name: str) -> None:
        """As View.done."""
        for view in self.views:
            view.done(name)

    def _chosen(self, prompt: Prompt, is_ready: bool) -> tuple[View, Candidate]:
        found = [view.candidate(prompt, is_ready) for view in self.views]
        if len(found) == 1:
            return self.views[0], found[0]
        arriving = Arriving(tokens=len(prompt), key=b"", sequence=0, hit_weight=HIT_WEIGHT)
        place = route(DEFAULT_POLICY, found, arriving) or 0
        return self.views[place], found[place]

    def _arrived(self, number: int, name: str) -> None:
        """The engine of this number has a request, whichever it was on its way to."""
        for other, view in enumerate(self.views):
            if other != number:
                view.arrived_elsewhere(name)
