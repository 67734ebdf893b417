"""Routers in the simulator: seeded stories keep the laws, and every planted fault breaks one of them."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.sim.routing import RoutingStory
from vnext.routing.policies import POLICIES

sys.path.insert(0, str(Path(__file__).parent / "planted"))
from planted_router_bugs import ROUTER_BUGS  # noqa: E402
from planting import Bug, is_found_by, planted  # noqa: E402

SEEDS, SEEDS_MAX = 24, 120


@pytest.mark.parametrize("seed", range(SEEDS))
def test_a_story_keeps_the_laws(seed: int) -> None:
    RoutingStory(seed).run()


def test_stories_show_what_they_are_for() -> None:
    stories = [RoutingStory(seed) for seed in range(SEEDS)]
    for story in stories:
        story.run()
    views = [view for story in stories for view in story.router.views]
    assert sum(view.mismatches for view in views) > 20, "damaged streams"
    assert sum(request.deaths for story in stories for request in story.requests.values()) > 20, "replicas that die"
    assert {story.policy for story in stories} == set(POLICIES)
    assert max(len(story.replicas) for story in stories) == 4 and sum(view.events for view in views) > 5_000


@pytest.mark.parametrize("bug", ROUTER_BUGS, ids=lambda bug: bug.name)
def test_a_planted_fault_is_found(bug: Bug) -> None:
    with planted(bug):
        for seed in range(SEEDS_MAX):
            try:
                RoutingStory(seed).run()
            except Exception as error:  # any failure of any kind is a find
                assert is_found_by(error, bug.found_by), f"seed {seed} failed otherwise: {error!r}"
                return
    pytest.fail(f"{SEEDS_MAX} stories and nobody noticed: a law or a fault is missing")
