"""What a replica owes as a routed request finds it: late views, pages that will have been taken, beside the truth at that moment."""

from __future__ import annotations

import random
from collections import deque

import pytest
from core_drive import Engine, started_with

from vnext.log.stream import EventStreams
from vnext.routing.prompts import Prompt
from vnext.routing.view import View
from vnext.state.digest import digest
from vnext.state.events import AnyEvent, pack_tokens
from vnext.state.state import State

COUNTING = list(range(1, 17))  # four blocks
NEW = Prompt(pack_tokens([99]))


class Late:
    """An engine, one view of its events at once and one `late` frames later."""

    def __init__(self, late: int, **changes: object) -> None:
        self.engine, self.now, self.view = Engine(**changes), View(), View()
        self.streams, self.quick_streams = (EventStreams(started_with(self.engine.state.config), "0") for _ in range(2))
        self._late, self._transit, self._events = late, deque(), []
        self._fold, self.engine.fold = self.engine.fold, self.fold
        self.now.feed(self.quick_streams.begin("now", self.engine.state))
        self.view.feed(self.streams.begin("late", self.engine.state))

    def fold(self, event: AnyEvent) -> State:
        self._events.append(event)
        state = self._fold(event)
        for _, frame in self.quick_streams.frames([event], state, digest(state)):
            self.now.feed(frame)
        return state

    def frame(self) -> None:
        """What was folded since the last one goes out."""
        state, events, self._events = self.engine.state, self._events, []
        self._transit += [b"".join(frame for _, frame in self.streams.frames(events, state, digest(state)))]
        if len(self._transit) > self._late and (frame := self._transit.popleft()):
            self.view.feed(frame)

    def step(self) -> None:
        self.engine.step()
        self.frame()

    def ask(self, name: str, tokens: list[int]) -> None:
        """A request is routed, and arrives at once."""
        self.view.routed(name, Prompt(pack_tokens(tokens)))
        self.engine.arrive(tokens, max_tokens=30, name=name, ignore_eos=True)

    def owed(self) -> tuple[int, int]:
        """As the late view has it, and in truth."""
        return tuple(view.candidate(NEW).waiting_tokens for view in (self.view, self.now))


def test_what_is_owed_counts_down_while_a_request_is_on_its_way() -> None:
    """A prompt that is being computed has one token less to wait for: its last one is the next step's."""
    late = Late(2, max_num_batched_tokens=8, page_count=64, max_model_len=128)
    for name in ("a", "b", "c"):
        late.ask(name, [1, 2, 3])
        for _ in range(4):
            late.step()  # the engine was idle when the first came; the others are seen to arrive two steps after their decisions
    late.ask("second", list(range(20, 60)))
    assert late.owed() == (40, 40)
    late.step()
    assert late.owed() == (35, 34), "a step of 8 tokens, three of which are decoded"
    late.step()
    assert late.owed() == (30, 29)
    late.ask("third", list(range(60, 70)))
    assert late.owed() == (40, 39)


@pytest.mark.parametrize("lateness", [0, 4])
def test_a_late_view_owes_what_the_engine_does(lateness: int) -> None:
    """Nearly: it does not see ends and admissions in between. One that took its state for the engine's is wrong by several steps."""
    rng, errors, naive, turns = random.Random(lateness), 0, 0, 0
    late = Late(lateness, max_num_batched_tokens=32, page_count=4_000, max_num_seqs=64)
    for turn in range(140):
        if rng.random() < 0.45:
            late.ask(f"r{turn}", [rng.randrange(1, 99) for _ in range(rng.randrange(1, 33))])
        late.step()
        if turn > 40:
            seen, truth = late.owed()
            kept, late.view._promised.lag = late.view._promised.lag, 0
            errors, naive, turns = errors + abs(seen - truth), naive + abs(late.owed()[0] - truth), turns + 1
            late.view._promised.lag = kept
    assert errors <= naive / 4 and errors < 2 * turns
    assert (naive == 0) is (lateness == 0)


def test_pages_that_come_before_are_no_hits() -> None:
    """Of 16 pages the last four of the queue hold the blocks, the end of the prompt first."""
    late = Late(0)
    late.engine.arrive(COUNTING, max_tokens=2)
    late.engine.run_out()
    late.frame()
    prompt = Prompt(pack_tokens(COUNTING + [50]))
    for tokens, hits in ((44, 16), (48, 12), (52, 8), (60, 0)):
        late.view.routed("before", Prompt(pack_tokens([70] * tokens)))
        assert late.view.candidate(prompt).hit_tokens == hits
        late.view.done("before")
    late.view.routed("before", Prompt(pack_tokens([70] * 60)))
    late.view.routed("like it", Prompt(pack_tokens(COUNTING)))
    assert late.view.candidate(prompt).hit_tokens == 16, "another prompt holds them, or computes them again"
