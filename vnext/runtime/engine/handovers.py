"""Hand-overs, as the engine core of a prompt's engine runs them: it decides when, and tells the client when all ranks are done.

The last output of a request whose blocks leave is kept until every rank has put its part where other engines find it; its client
then goes on elsewhere. If ranks die meanwhile, the client gets its output without a ticket, and the other engine computes the
prompt.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from msgspec.structs import replace

from vnext.runtime.engine.facility import NO_ERRORS, Facility
from vnext.runtime.engine.owners import News
from vnext.runtime.hosts.handover.tickets import Ticket, encode_ticket
from vnext.runtime.protocol.messages import BlocksPublished, RankReady, RequestOutput
from vnext.sched.handover import next_hand_over
from vnext.state.events import BlocksHandedOver
from vnext.state.state import State

Tell = Callable[[Sequence[News]], None]


def ticket_of(ranks: Sequence[RankReady], transport: str, secret: bytes) -> str:
    """What a request's client takes to another engine; "" where this engine hands nothing over."""
    places = [ready.handover for ready in ranks if ready.handover is not None]
    if not places or len(places) < len(ranks):
        return ""
    folder = "" if transport == "tcp" else places[0].folder
    addresses = tuple(place.address for place in places if place.address and transport != "shm")
    return encode_ticket(Ticket(folder=folder, addresses=addresses), secret)


class HandOvers(Facility):
    """Requests whose blocks leave. `wanted` are those that are to leave, which the caller adds to."""

    answers = (BlocksPublished,)

    def __init__(self, world_size: int, ticket: str, tell: Tell, wanted: set[int]) -> None:
        """`ticket`: what a client takes to the other engine. `tell` sends outputs to their clients."""
        self._world_size, self._ticket, self._tell, self._wanted = world_size, ticket, tell, wanted
        self._answered: dict[int, set[int]] = {}
        self._kept: dict[int, RequestOutput] = {}

    def next_event(self, state: State) -> BlocksHandedOver | None:
        """The hand-over that is due; None while there is none."""
        for id_ in [id_ for id_ in self._wanted if id_ not in state.requests]:
            self._wanted.discard(id_)
        event = next_hand_over(state, self._wanted) if self._wanted else None
        if event is not None:
            self._wanted.discard(event.id)
            self._answered[event.id] = set()
        return event

    def answered(self, message: BlocksPublished, state: State) -> Mapping[int, str]:
        """A rank has done its part."""
        if (ranks := self._answered.get(message.id)) is not None:
            ranks.add(message.rank)
            if len(ranks) == self._world_size:
                self._end(message.id, self._ticket)
        return NO_ERRORS

    def without_kept(self, news: Iterable[News]) -> list[News]:
        """The news without the last outputs that wait for ranks."""
        if not self._answered:
            return list(news)
        return [(going, [output for output in outputs if not self._keeps(output)]) for going, outputs in news]

    def _keeps(self, output: RequestOutput) -> bool:
        if output.number not in self._answered or not output.finish:
            return False
        if output.finish == "abort":
            del self._answered[output.number]
            return False
        self._kept[output.number] = output
        if len(self._answered[output.number]) == self._world_size:
            self._end(output.number, self._ticket)
        return True

    def lose_steps(self) -> None:
        """Blocks of requests that wait again leave when they are computed."""
        for id_ in [id_ for id_ in self._answered if id_ not in self._kept]:
            del self._answered[id_]
            self._wanted.add(id_)

    def lose_ranks(self) -> None:
        """Clients whose blocks were to leave go on without a ticket."""
        for id_ in list(self._answered):
            if id_ in self._kept:
                self._end(id_, "")
            else:
                del self._answered[id_]
                self._wanted.add(id_)

    def _end(self, id_: int, ticket: str) -> None:
        """Let the client go on, once its output is there."""
        if (output := self._kept.pop(id_, None)) is not None:
            del self._answered[id_]
            self._tell([(None, [replace(output, ticket=ticket)])])
