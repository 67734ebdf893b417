"""Which facilities an engine core has, and what concerns all of them: answers of ranks, their loss, statistics."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from vnext.runtime.engine.adapters import AdapterLoading
from vnext.runtime.engine.clients import Clients
from vnext.runtime.engine.clock import EventClock
from vnext.runtime.engine.draft_costs import DraftCosts
from vnext.runtime.engine.facility import Facility, Send
from vnext.runtime.engine.handovers import HandOvers
from vnext.runtime.engine.operations import Operations
from vnext.runtime.engine.recovery import Shortages
from vnext.runtime.engine.searches import Searches
from vnext.runtime.engine.tiers import TierTransfers
from vnext.runtime.protocol.messages import RankReady
from vnext.runtime.protocol.stats import ExpertStats, StateStats
from vnext.state.events import EngineStarted, TierOpened
from vnext.state.pool import HELD, Pool, pinned_pages
from vnext.state.state import State


class Held(NamedTuple):
    """What ranks hold beside their caches. `tier`: blocks on disk, None without a disk tier. `ticket`: what clients take to the
    engine that blocks are handed over to, "" where this one hands nothing over. `keepers`: how many look for vectors of inputs."""

    tier: TierOpened | None = None
    ticket: str = ""
    keepers: int = 0


NOTHING_HELD = Held()


class Facilities:
    """Those of one engine core. `all` is in the order in which a turn asks for events."""

    def __init__(self, started: EngineStarted, send: Send, clients: Clients, operations: Operations, held: Held) -> None:
        self.operations = operations
        self.shortages = Shortages()
        self.all: list[Facility] = [operations, self.shortages]
        if started.config.max_loras:
            self.all.append(AdapterLoading(started.world_size, send, clients.asked.adapter_files))
        if held.tier is not None:
            clients.asked.tickets = {}
            self.all.append(TierTransfers(started.world_size, send, held.tier, clients.asked.tickets))
        if held.keepers:
            clients.asked.inputs_tickets = {}
            self.all.append(Searches(held.keepers, send, clients.asked.inputs_tickets))
        if started.config.pinned_pages_max:
            self.all.append(EventClock())
        self.handovers: HandOvers | None = None
        if held.ticket:
            clients.asked.to_hand_over = set()
            self.handovers = HandOvers(started.world_size, held.ticket, clients.tell, clients.asked.to_hand_over)
            self.all.append(self.handovers)
        self.draft_costs: DraftCosts | None = None
        self.experts: ExpertStats | None = None  # as rank 0 has reported it last
        self._takers = {kind: facility for facility in self.all for kind in facility.answers}

    def measure_draft_costs(self) -> None:
        self.draft_costs = DraftCosts()
        self.all.append(self.draft_costs)

    def taker(self, message: object) -> Facility | None:
        """Who takes this message of a rank; None if nobody does."""
        return self._takers.get(type(message))

    def lose_steps(self) -> None:
        """Memory ran short for the steps in flight."""
        for facility in self.all:
            facility.lose_steps()

    def lose_ranks(self) -> None:
        for facility in self.all:
            facility.lose_ranks()

    def begin_again(self, send: Send, ranks: Sequence[RankReady]) -> None:
        """Other ranks are in their place."""
        for facility in self.all:
            facility.begin_again(send, ranks)

    def stats(self, state: State) -> Mapping[str, object]:
        """Fields of EngineStats."""
        found: dict[str, object] = {"experts": self.experts}
        for facility in self.all:
            found.update(facility.stats(state))
        return found if (states := state.pool.states) is None else found | {"states": _states(states)}


def _states(states: Pool) -> StateStats:
    held, snapshots = states.page_count - states.free, len(states.prefix_index)
    held -= int((states.status.at(pinned_pages(states)) == HELD).sum())  # by a pin alone
    return StateStats(pages=states.page_count, held=held, snapshots=snapshots)
