"""Guided requests: whatever happens, each step finds in both halves what its tokens say, and no other request's."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import pytest
from msgspec.structs import replace

from tests.sim.crashes import Branching, Story, shortened
from tests.sim.scenario import Client, Scenario, servable
from tests.sim.scenario_draw import PAGE_COUNT_MAX, scenario
from tests.sim.seeds import Form
from tests.sim.simulator import Simulation
from vnext.sim.checks.plain_state import Divergence
from vnext.state import reduce as reducer, state as states
from vnext.state.config import Speculation
from vnext.state.errors import LawBroken
from vnext.state.events import StepCommitted, pack_tokens, plan_of
from vnext.state.params import NO_LOGPROBS, NO_POOLING, Guidance, Sampling, hits_max

SEEDS = range(40, 58)


def guided(seed: int, given: Sequence[Client] = ()) -> Scenario:
    """A drawn scenario, or one with the `given` clients, in which two of three requests have guidance, half of them with a negative
    prompt that is longer; in some there are drafts, and layers with windows."""
    drawn = scenario(seed, client_count=40)
    windows = drawn.config.windows or (0,)
    config = replace(
        drawn.config, windows=(*windows, *(0 for _ in windows)), guidance=True, guided_hits=seed % 4 > 0, state_pages=0, inputs_a_step=0, microbatches=1,
        page_count=min(2 * drawn.config.page_count, PAGE_COUNT_MAX), speculation=Speculation() if seed % 3 == 0 else None,
    )  # fmt: skip
    clients = tuple(_guided(client, place) for place, client in enumerate(given or drawn.clients) if min(client.prompt, default=0) >= 0)
    return replace(drawn, config=config, clients=tuple(each for each in clients if servable(config, each)), disk=None)


def short(seed: int) -> Scenario:
    """The beginning of such a scenario, without deaths and log."""
    found = guided(seed, [shortened(client) for client in scenario(seed, client_count=40).clients[:6]])
    return replace(found, faults=replace(found.faults, deaths=0, logged=False), reset_us=(), weights=found.weights[:1])


def _guided(client: Client, place: int) -> Client:
    if place % 3 == 2 or client.sampling.pooling != NO_POOLING or not client.prompt:
        return client
    beside = pack_tokens([1 + (place + each) % 3 for each in range(1 + place % len(client.prompt))])
    is_prompt = place % 3 == 1 and client.sampling.prompt_logprobs == NO_LOGPROBS
    return replace(client, sampling=replace(client.sampling, guidance=Guidance(scale=2.0, beside=beside, is_prompt=is_prompt)))


def told(seeds: range) -> Counter[str]:
    found = Counter[str]()
    for seed in seeds:
        simulation = Simulation(guided(seed))
        try:
            simulation.run_and_require_all()
        except Exception as error:
            error.add_note(f"guided({seed})")
            raise
        for event in simulation.events:
            plan = plan_of(event)
            found["preempted"] += plan is not None and len(plan.preempted) > 0
            found["drafted"] += isinstance(event, StepCommitted) and bool(event.drafted)
        found["hits"] += simulation.state.counters.prefix_hit_tokens
        found["guided hits"] += guided_hits(simulation)
    return found


def guided_hits(simulation: Simulation) -> int:
    """Tokens that requests with guidance had from the cache when they were admitted first."""
    state, found = reducer.start(simulation.events[0]), 0
    for event in simulation.events[1:]:
        state, plan = reducer.reduce(state, event), plan_of(event)
        count = len(plan.admitted) if plan is not None else 0
        new = zip(state.rows.id[-count:].tolist(), state.rows.cached[-count:].tolist()) if count else ()
        found += sum(cached for id_, cached in new if state.requests[id_].sampling.guidance)
    return found


@pytest.mark.parametrize("seeds", [SEEDS[:9], SEEDS[9:]])
def test_both_halves_hold_what_their_tokens_say(seeds: range) -> None:
    found = told(seeds)
    assert found["preempted"] >= 10 and found["drafted"] >= 10 and found["hits"] >= 25 and found["guided hits"] >= 25, found


@pytest.mark.parametrize("seed", SEEDS[:6])
def test_a_crash_after_every_event_changes_no_guided_answer(seed: int) -> None:
    drawn = short(seed)
    with Form(seed):
        branching = Branching(drawn, seed)
        branching.run_and_require_all()
        story = Story(seed, 2, drawn, branching.outcome().answers)
        assert len(list(map(story.judged, branching.ended))) > 4


def test_a_guided_request_behind_blocks_of_its_half_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def too_many(sampling: Sampling, prompt: int, guided_hits: bool = True) -> int:
        most = hits_max(sampling, prompt, guided_hits)
        return most + 8 if sampling.guidance else most

    monkeypatch.setattr(states, "hits_max", too_many)
    with pytest.raises(LawBroken, match="P4"):
        told(SEEDS)


def test_a_page_that_leaves_with_the_window_of_the_other_half_is_found() -> None:
    with pytest.raises(Divergence, match="reads other content"):
        for seed in SEEDS:
            found = guided(seed)
            Simulation(replace(found, config=replace(found.config, windows=(2, 2)))).run_and_require_all()
