"""A router in front of several engines, simulated: late, cut and damaged streams, replicas that die, requests that go on
elsewhere.

Owns three laws. R1: a view that holds itself for exact has a state that its engine had, in that order, and is lost only
where its stream was damaged. R2: no request goes to a replica that is not ready. R3: every request that arrives is routed
once, and once more for each death of the replica that had it, and counts once where it was routed. The engines are those of
deciding.py, with every law of theirs.
"""

from __future__ import annotations

from collections import deque

from tests.sim.deciding import DecidingCore
from vnext.log.stream import EventStreams
from vnext.routing.policies import POLICIES
from vnext.routing.prompts import Prompt
from vnext.routing.router import Router
from vnext.sim.checks.plain_state import Divergence, PlainState, contents, differences
from vnext.sim.rng import Rng
from vnext.state.config import SchedulerConfig
from vnext.state.digest import digest
from vnext.state.events import (
    EngineStarted,
    PrefixCacheReset,
    RequestAborted,
    RequestArrived,
    RequestId,
    StepCommitted,
    pack_tokens,
)
from vnext.state.params import Sampling

READER = "router"
VOCABULARY = 50
PROMPTS = tuple(tuple((7 * number + 3 * place) % VOCABULARY for place in range(40)) for number in range(3))
TURNS_MAX = 4_000


class RoutedRequest:
    """A request of the simulation: how often it was routed, where it is (-1: nowhere), and whether it has ended. Mutable."""

    def __init__(self, name: str, prompt: tuple[int, ...], max_tokens: int) -> None:
        self.name, self.prompt, self.max_tokens = name, prompt, max_tokens
        self.routed = self.deaths = 0
        self.place, self.has_ended = -1, False


class Replica:
    """An engine, its stream in transit, and what it was at each event. Mutable."""

    def __init__(self, rng: Rng) -> None:
        self._rng = rng
        self.is_ready, self.damages = True, 0
        self.arriving: deque[RoutedRequest] = deque()
        self.transit = b""
        self.start()

    def start(self) -> None:
        """Another engine takes the place of the one before."""
        rng = self._rng
        config = SchedulerConfig(
            block_size=4, page_count=rng.between(20, 60), max_num_batched_tokens=rng.between(4, 32),
            max_num_seqs=rng.between(1, 6), max_model_len=64, pipeline_depth=rng.between(1, 2), eos_token_ids=(0,),
            vocab_size=VOCABULARY,
        )  # fmt: skip
        started = EngineStarted(config=config, model="toy", model_digest="", world_size=1, environment={}, started_ns=0)
        self.core, self.streams = DecidingCore(started), EventStreams(started, "simulated")
        self.digests = {1: digest(self.core.state)}
        self._streamed = 1
        self.arriving.clear()
        self.transit = b""

    def subscribe(self) -> None:
        """The stream begins again, behind what is in transit."""
        self.transit += self.streams.begin(READER, self.core.state)

    def stream(self) -> None:
        """What has been folded since the last call is a frame."""
        events, state = self.core.events[self._streamed :], self.core.state
        self._streamed = len(self.core.events)
        self.digests[state.sequence] = digest(state)
        self.transit += b"".join(frame for _, frame in self.streams.frames(events, state, digest(state)))


class RoutingStory:
    """One run from a seed. Mutable."""

    def __init__(self, seed: int, request_count: int = 40) -> None:
        self.rng = Rng(seed)
        self.policy = self.rng.choose(tuple(POLICIES))
        self.replicas = [Replica(self.rng) for _ in range(self.rng.between(1, 4))]
        self.router = Router(len(self.replicas), self.policy)
        self.requests: dict[str, RoutedRequest] = {}
        self.unrouted: deque[RoutedRequest] = deque()
        self._to_come = request_count
        self._seen = [0] * len(self.replicas)
        for place, replica in enumerate(self.replicas):
            replica.subscribe()
            self._deliver(place, len(replica.transit))

    def run(self) -> None:
        """To the end of all requests. Raises Divergence, LawBroken or IllegalEvent."""
        for _ in range(TURNS_MAX):
            self._turn()
            if not self._to_come and all(each.has_ended for each in self.requests.values()):
                break
        else:
            raise Divergence("R3: a request was never routed, or never ends")
        self._require_whole()

    def _turn(self) -> None:
        rng = self.rng
        if self._to_come and rng.happens(30):
            self._arrive()
        while self.unrouted and self._route(self.unrouted[0]):
            self.unrouted.popleft()
        for place, replica in enumerate(self.replicas):
            if rng.happens(80):
                self._run_engine(replica)
            if rng.happens(70):
                self._deliver(place, rng.between(1, 2 * len(replica.transit) + 1))
            if rng.happens(1):
                self._damage(replica)
            if rng.happens(2):
                replica.is_ready = not replica.is_ready  # it drains, or is back
            if rng.happens(1):
                self._die(place)
        if not self._to_come:
            self.replicas[rng.below(len(self.replicas))].is_ready = True

    # ---- requests --------------------------------------------------------------------------------------------------

    def _arrive(self) -> None:
        self._to_come -= 1
        prompt = self.rng.choose(PROMPTS)[: self.rng.between(1, 40)] + (self.rng.below(VOCABULARY),)
        request = RoutedRequest(str(len(self.requests)), prompt, self.rng.between(1, 12))
        self.requests[request.name] = request
        self.unrouted.append(request)

    def _route(self, request: RoutedRequest) -> bool:
        ready = [replica.is_ready for replica in self.replicas]
        place = self.router.choose(request.name, Prompt(pack_tokens(request.prompt)), ready, key=request.name.encode())
        if place is None:
            if any(ready):
                raise Divergence("R3: a request was not routed although a replica is ready")
            return False
        if not ready[place]:
            raise Divergence(f"R2: a request was routed to replica {place}, which is not ready")
        request.routed, request.place = request.routed + 1, place
        self.replicas[place].arriving.append(request)
        return True

    def _run_engine(self, replica: Replica) -> None:
        """Arrivals in their order, then a plan, then the oldest step's result."""
        core, rng = replica.core, self.rng
        while replica.arriving and rng.happens(60):
            core.fold(_arrival(core, replica.arriving.popleft()))
        if core.decide() is None or rng.happens(70):
            self._commit(core)
        if rng.happens(1):
            core.fold(PrefixCacheReset())
        if rng.happens(2) and core.state.requests:
            id_ = RequestId(min(core.state.requests.mapping()))
            self._end(core.state.requests[id_].name)
            core.fold(RequestAborted(ids=(id_,), reason="client"))
        replica.stream()

    def _commit(self, core: DecidingCore) -> None:
        if core.state.in_flight:
            count = int(core.state.in_flight[0].samples.sum())
            tokens = pack_tokens([self.rng.below(VOCABULARY) for _ in range(count)])
            for output in core.fold(StepCommitted(step=core.state.committed, tokens=tokens)):
                if output.finish:
                    self._end(output.name)

    def _end(self, name: str) -> None:
        request = self.requests[name]
        if request.has_ended:
            raise Divergence(f"R3: request {name} has ended twice")
        request.has_ended = True
        self.router.done(name)

    # ---- streams and deaths ----------------------------------------------------------------------------------------

    def _deliver(self, place: int, size: int) -> None:
        """Some of the bytes in transit arrive, and the view is compared with what its engine was."""
        replica, view = self.replicas[place], self.router.views[place]
        data, replica.transit = replica.transit[:size], replica.transit[size:]
        if data and view.feed(data):
            replica.subscribe()
        if view.mismatches > replica.damages:
            raise Divergence(f"R1: the view of replica {place} was lost: {view.failure}")
        if view.state is not None:
            self._compare(place)

    def _compare(self, place: int) -> None:
        state, replica = self.router.views[place].state, self.replicas[place]
        assert state is not None
        if replica.digests.get(state.sequence) != digest(state):
            raise Divergence(f"R1: the view of replica {place} has another state behind event {state.sequence - 1}")
        if state.sequence < self._seen[place]:
            raise Divergence(f"R1: the view of replica {place} has gone back to event {state.sequence - 1}")
        self._seen[place] = state.sequence
        if state.sequence != replica.core.state.sequence:
            return
        known = self.router.views[place].candidate(Prompt(pack_tokens([1])))
        if known.running + known.waiting != len(replica.core.state.requests) + len(replica.arriving):
            raise Divergence(f"R3: the view of replica {place} counts {known.running} and {known.waiting} requests")
        if self.rng.happens(20):
            if differ := differences(contents(replica.core.seen), contents(PlainState(state))):
                raise Divergence(f"R1: the view of replica {place} has other {', '.join(differ)}")

    def _damage(self, replica: Replica) -> None:
        """A bit of the bytes in transit flips, or some of them are lost."""
        if not (size := len(replica.transit)):
            return
        at, replica.damages = self.rng.below(size), replica.damages + 1
        if self.rng.happens(50):
            changed = bytes([replica.transit[at] ^ (1 << self.rng.below(8))])
            replica.transit = replica.transit[:at] + changed + replica.transit[at + 1 :]
        else:
            replica.transit = replica.transit[:at] + replica.transit[at + self.rng.between(1, 40) :]
        replica.transit += bytes(64)  # a longer record does not wait for bytes for ever

    def _die(self, place: int) -> None:
        """An engine dies: its requests, those on their way to it included, are routed again, and its successor has a new
        stream."""
        replica = self.replicas[place]
        replica.start()
        for request in self.requests.values():
            if request.place == place and not request.has_ended:
                request.place, request.deaths = -1, request.deaths + 1
                self.unrouted.append(request)
                self.router.done(request.name)
        self.router.views[place].feed(b"")
        self._seen[place] = 0
        replica.subscribe()

    # ---- the end ---------------------------------------------------------------------------------------------------

    def _require_whole(self) -> None:
        for request in self.requests.values():
            if request.routed != 1 + request.deaths:
                raise Divergence(f"R3: request {request.name} was routed {request.routed} times and lost {request.deaths} times")
        for place, replica in enumerate(self.replicas):
            replica.stream()
            for _ in range(3):  # a stream that was damaged before is begun again
                self._deliver(place, len(replica.transit))
            view = self.router.views[place]
            if replica.damages and view.state is not None and self._is_behind(place):
                view.feed(b"")  # a damaged length waits for bytes until the connection ends
                replica.subscribe()
                self._deliver(place, len(replica.transit))
            if self._is_behind(place):
                raise Divergence(f"R1: the view of replica {place} does not reach its engine's last event")

    def _is_behind(self, place: int) -> bool:
        """Whether a view is not yet where its engine is."""
        state = self.router.views[place].state
        return state is None or state.sequence != self.replicas[place].core.state.sequence


def _arrival(core: DecidingCore, request: RoutedRequest) -> RequestArrived:
    return RequestArrived(
        id=RequestId(core.state.next_id), name=request.name, prompt=pack_tokens(request.prompt),
        sampling=Sampling(seed=1, max_tokens=request.max_tokens), priority=0, arrival_ns=0,
    )  # fmt: skip
