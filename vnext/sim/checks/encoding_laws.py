"""Laws of encoding, over a whole run: the units of inputs are counted a second time, from the events alone."""

from __future__ import annotations

from vnext.sim.checks.plain_state import PlainState
from vnext.state.errors import LawBroken
from vnext.state.events import AnyEvent, EngineRecovered, InputEncoded, InputsFound, InputsSought, plan_of, unpack_tokens
from vnext.state.store.fields import INPUT_BEGINS


class EncodingBook:
    """The input whose units ranks have computed, how many, and how many of them since the last plan; for whom they look in files,
    and which inputs (request, place) they have read there. Mutable."""

    def __init__(self) -> None:
        self._input, self._units, self._all = (-1, -1), 0, 0
        self._since, self._last_since, self._has_begun = 0, 0, False
        self._searches, self._found = set[int](), set[tuple[int, int]]()

    def write(self, before: PlainState, event: AnyEvent, after: PlainState) -> None:
        """Check what one event does to inputs. Raises LawBroken."""
        match event:
            case InputEncoded():
                self._count(before, event)
            case EngineRecovered():
                self._units = 0
                self._searches.clear()
                self._found.clear()
            case InputsSought():
                self._searches.add(event.id)
            case InputsFound():
                self._searches.discard(event.id)
                self._found.update((event.id, place) for place in event.places)
        if (plan := plan_of(event)) is not None and (early := self._searches.intersection(after.in_flight[-1].ids)):
            raise LawBroken("E6", f"requests {sorted(early)} are in step {plan.step} while their inputs are looked for")
        if after.state.config.input_units and (plan := plan_of(event)) is not None:
            self._plan(before, bool(plan.preempted or plan.changed), after)

    def decided(self, before: PlainState, lacks_pages: bool) -> None:
        """E4: an input that a row has reached gets a unit with each decided step, or one begins."""
        if lacks_pages or self._last_since or self._has_begun:
            return
        rows = zip(before.rows.id, before.rows.computed, before.rows.prompt, before.histories)
        for id_, computed, prompt, history in rows if before.state.config.input_units else ():
            has_all = (self._input == (id_, computed) and self._units == self._all) or (id_, computed) in self._found
            if not has_all and computed < prompt and unpack_tokens(history)[computed] < INPUT_BEGINS:
                raise LawBroken("E4", f"request {id_} waits at the input at {computed}, and the next step has no unit for it")

    def _count(self, before: PlainState, event: InputEncoded) -> None:
        """E2: units come in order and once, one a step beside requests that decode."""
        if (event.id, event.place) != self._input:
            self._input, self._units, self._all = (event.id, event.place), 0, _units_of(before, event)
        self._units, self._since = self._units + event.units, self._since + event.units
        beside = any(computed >= prompt for computed, prompt in zip(before.rows.computed, before.rows.prompt))
        if self._units > self._all or (beside and self._since > 1):
            raise LawBroken("E2", f"{event}, {self._units} units in all and {self._since} with this step")

    def _plan(self, before: PlainState, lacks_pages: bool, after: PlainState) -> None:
        """E3: an input begins behind its last unit, except where it was found or pages lack. E6: no step has a request whose inputs
        are looked for."""
        step, self._has_begun = after.in_flight[-1], False
        self._last_since, self._since = self._since, 0
        for id_, start, count in zip(step.ids, step.starts, step.counts):
            row = after.rows.id.index(id_)
            known = unpack_tokens(after.histories[row])
            for place in range(start, min(start + count, after.rows.prompt[row])):
                begins = place
                while id_ not in before.rows.id and place == start and INPUT_BEGINS <= known[begins] < 0:
                    begins -= 1
                if known[begins] >= INPUT_BEGINS or (id_, begins) in self._found:
                    continue
                if self._input == (id_, begins) and self._units == self._all:
                    self._units, self._has_begun = 0, True
                elif not lacks_pages:
                    raise LawBroken("E3", f"request {id_} begins the input at {begins} with {self._units} units of {self._input}")


def _units_of(seen: PlainState, event: InputEncoded) -> int:
    """The units of an input, token by token: each of its tokens is a part of one."""
    length, known = 1, unpack_tokens(seen.state.requests[event.id].prompt).tolist()
    while event.place + length < len(known) and INPUT_BEGINS <= known[event.place + length] < 0:
        length += 1
    parts = length * seen.state.config.input_units
    return next(units for units in range(1, 2 + parts) if units * 1024 >= parts)
