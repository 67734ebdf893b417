"""The simulator's own faults: what may not happen is refused, a rank that drifts is noticed, a torn log is a shorter one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest
from msgspec.structs import replace

from tests.sim import illegal_events, scenario_draw as scenarios
from tests.sim.deciding import DecidingCore
from tests.sim.fleet import Fleet, events_of
from tests.sim.scenario import NEVER, Client, Faults, Scenario, servable
from tests.sim.scenario_draw import scenario
from tests.sim.simulator import Simulation, simulate
from vnext.sim.checks.plain_state import Divergence
from vnext.sim.findings import Tape, check_events
from vnext.sim.rng import Rng
from vnext.sim.shrink import Author, Whim, moves_of
from vnext.sim.toy import next_token
from vnext.state.errors import IllegalEvent
from vnext.state.params import Sampling
from vnext.state.reduce import reduce, start
from vnext.state.state import State
from vnext.state.store.fields import FIELD_NAMES, STRUCTURE_FIELD_COUNT
from vnext.state.store.rows import Rows

# ---- what may not happen -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", dict.fromkeys(illegal_events.ILLEGAL), ids=lambda kind: kind.__name__)
def test_what_may_not_happen_is_refused_in_every_state(kind: Callable) -> None:
    rng = Rng(5)
    for seed in range(400, 408):
        events = simulate(scenario(seed, client_count=20)).events
        core = DecidingCore(events[0])
        for event in events[1:]:
            core.fold(event)
            core.require_refused(kind(rng, core.seen))


def test_an_event_that_is_taken_although_it_may_not_happen_is_noticed() -> None:
    events = simulate(scenario(4)).events
    core = DecidingCore(events[0])
    with pytest.raises(Divergence, match="RequestArrived should have been refused"):
        core.require_refused(events[1])
    core.fold(events[1])


def with_whims(seed: int) -> Scenario:
    drawn = scenario(seed)
    config = replace(drawn.config, policy="priority", chunked_prefill=True)
    return replace(drawn, config=config, faults=Faults(whim=60))


def test_plans_that_nobody_decided_are_lawful_or_refused() -> None:
    """Many are taken, they change no answer (the simulator compares), and a judge of the log has nothing to say."""
    met: Counter[str] = Counter()
    for seed in range(410, 420):
        events = simulate(with_whims(seed)).events
        whims = [move.plan for move in moves_of(events) if isinstance(move, Whim)]
        met["taken"] += len(whims)
        met["preempting"] += sum(bool(plan.preempted) for plan in whims)
        met["admitting"] += sum(bool(plan.admitted) for plan in whims)
        assert check_events(events) is None
    assert min(met.values()) > 50, met


def test_an_author_writes_whims_again() -> None:
    events = simulate(with_whims(410)).events
    vocab_size = events[0].config.vocab_size
    author = Author(events[0], lambda arrival, history: next_token(history, arrival.sampling.seed, vocab_size))
    for place, move in enumerate(moves_of(events)):
        assert author.follow(place, move)
    assert author.events == list(events)


# ---- deaths ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("deaths", [dict(ranks_die=2), dict(core_dies=2), dict(ranks_die=40), dict(core_dies=40)])
def test_deaths_change_no_stream(deaths: dict[str, int]) -> None:
    """Ranks and engine cores die now and then, or one upon the other; whom nobody aborted gets what it gets without."""
    died = 0
    for seed in range(440, 452):
        drawn = scenario(seed, client_count=20)
        clients = tuple(replace(client, abort_us=NEVER, stop=()) for client in drawn.clients)
        calm = replace(drawn, clients=clients, shutdown_us=NEVER, faults=replace(drawn.faults, deaths=0))
        wild = Simulation(replace(calm, faults=replace(calm.faults, deaths=20, **deaths)))
        wild.run_and_require_all()
        died += wild.deaths
        assert wild.outcome().answers == simulate(calm).answers
    assert died > 50


def test_an_engine_dies_while_its_clients_come_back() -> None:
    """Between one client's return and the next; those that had not come yet have lost nothing."""
    drawn = scenario(441, client_count=20)
    simulation, unknown = Simulation(replace(drawn, faults=Faults(core_dies=40, deaths=24))), 0
    right = simulation._start_again

    def start_again() -> None:
        nonlocal unknown
        unknown += bool(simulation.streams.waiting) and bool(simulation.streams.ids)
        right()

    simulation._start_again = start_again
    simulation.run_and_require_all()
    assert unknown > 2


# ---- ranks that drift --------------------------------------------------------------------------------------------


def drifted(state: State, what: str) -> State:
    """The state with one number changed, in its last row if it is one of a row."""
    if what in FIELD_NAMES:
        cells = state.rows.cells.copy()
        cells[FIELD_NAMES.index(what), -1] += 1
        return replace(state, rows=Rows(cells))
    if what == "finished":
        return replace(state, counters=replace(state.counters, finished=state.counters.finished + 1))
    if what == "token_digest":
        return replace(state, token_digest=state.token_digest ^ 1)
    if what == "free order":
        pool = state.pool
        return replace(state, pool=replace(pool, head=pool.head + 1))
    return replace(state, requests=state.requests.with_items([(-1, state.requests[int(state.rows.id[-1])])]))


DRIFTS = [*FIELD_NAMES[:STRUCTURE_FIELD_COUNT], "chain_0", "finished", "token_digest", "free order", "requests"]


STAYS_TOKENS = 12


def where_rows_stay(seed: int) -> Scenario:
    """Long answers in a large pool: nobody stops early, leaves or gives way."""
    drawn = scenario(seed)
    sampling = Sampling(seed=1, max_tokens=STAYS_TOKENS + 8)
    clients = [Client(arrival_us=500 * n, prompt=(1, 2), sampling=sampling, priority=0, cache_salt="") for n in range(12)]
    config = replace(
        drawn.config, eos_token_ids=(), vocab_size=7, prefix_caching=True, max_num_seqs=4, block_size=4, page_count=64,
        max_model_len=60, chunked_prefill=True, long_prefill_token_threshold=0, max_num_batched_tokens=16,
    )  # fmt: skip
    return Scenario(seed=seed, config=config, clients=tuple(clients), reset_us=(), rank_count=2, faults=Faults(slow_rank=30))


@pytest.mark.parametrize("what", DRIFTS)
def test_a_rank_that_drifts_is_noticed(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One number of one rank's state becomes another, once: Y1 by digest, by contents, or by what it refuses or samples."""
    right, drifts = Fleet.catch_up, []

    def catch_up(fleet: Fleet, rank: int):
        said = right(fleet, rank)
        state = fleet.ranks[1].state
        if rank == 1 and not drifts and len(state.rows) > 1 and state.rows.limit[-1] - state.rows.known[-1] >= STAYS_TOKENS:
            drifts.append(len(fleet.core.events))
            fleet.ranks[1].state = drifted(state, what)
        return said

    monkeypatch.setattr(Fleet, "catch_up", catch_up)
    for seed in range(430, 435):
        drifts.clear()
        with pytest.raises((Divergence, IllegalEvent, LookupError, ValueError)):
            simulate(where_rows_stay(seed))
        assert drifts


# ---- the log -----------------------------------------------------------------------------------------------------


def taped(seed: int) -> tuple[Tape, tuple]:
    """A short run written in frames of one to three events."""
    rng, events = Rng(seed), simulate(scenario(seed, client_count=6)).events
    tape, state, frame = Tape(events[0], "simulated"), start(events[0]), []
    for number, event in enumerate(events[1:], start=2):
        state = reduce(state, event)
        frame.append(event)
        if rng.happens(50) or number == len(events):
            tape.write(frame, state)
            frame = []
    return tape, events


def test_a_log_cut_anywhere_is_its_whole_frames() -> None:
    tape, events = taped(3)
    data = tape.data()
    assert events_of(data) == (list(events), "complete")
    for size in range(tape.ends[0][0], len(data)):
        whole, count = max(end for end in tape.ends if end[0] <= size)
        assert events_of(data[:size]) == (list(events[:count]), "complete" if whole == size else "torn")


def test_a_rank_that_lost_frames_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The simulator compares what was read with what is whole: a reader that stops a frame early is found."""
    monkeypatch.setattr("tests.sim.fleet.events_of", lambda data: (events_of(data)[0][:-1], "torn"))
    with pytest.raises(Divergence, match="X2"):
        simulate(replace(scenario(3), faults=Faults(crash=100, logged=True)))


# ---- what scenarios meet -----------------------------------------------------------------------------------------


def test_scenarios_meet_every_class_of_faults() -> None:
    """Over a few hundred seeds each class is on and off, and each setting has all of its values."""
    drawn = [scenario(seed, client_count=20) for seed in range(400)]
    for name in Faults.__struct_fields__:
        assert {bool(getattr(one.faults, name)) for one in drawn} == {True, False}, name
    values = {name: {getattr(one.config, name) for one in drawn} for name in drawn[0].config.__struct_fields__}
    assert values["block_size"] >= {1, 2, 3, 4, 16} and values["page_count"] >= {1, 2, 3, 16}
    assert values["pipeline_depth"] >= {1, 2, 3, 4} and values["max_num_batched_tokens"] >= {1, 2, 3}
    assert values["policy"] == {"fcfs", "priority", "fair", "deadline:1", *scenarios.POLICIES} and len(values["vocab_size"]) == 3
    assert values["chunked_prefill"] == values["prefix_caching"] == {True, False}
    assert {one.rank_count for one in drawn} == {1, 2, 3}
    assert {one.shutdown_us == NEVER for one in drawn} == {True, False}
    assert {min(len(one.reset_us), 20) for one in drawn} >= {0, 1, 20}
    clients = [(one.config, client) for one in drawn for client in one.clients]
    assert 0.02 < sum(not servable(*each) for each in clients) / len(clients) < 0.3
    lengths = {(len(client.prompt) - config.page_count * config.block_size) for config, client in clients}
    assert lengths >= {-1, 0, 1} and 0 in {len(client.prompt) for _, client in clients}
    ends = {(len(client.prompt) + client.sampling.max_tokens) % config.block_size for config, client in clients}
    assert ends == set(range(16))
    assert {client.sampling.max_tokens for _, client in clients} >= {0, 1, 2}
