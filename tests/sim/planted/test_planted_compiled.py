"""Faults planted into the compiled forms: each is found by a scan of seeds, soon, and by its law or exception.

What test_planted.py is to the plain forms. The engine's other parts are as they are.
"""

from __future__ import annotations

from contextlib import nullcontext
from itertools import count

import pytest
from compiling import CompiledBug, Variants
from planted_compiled_bugs import COMPILED_BUGS, DRAFTS, INPUTS, MICROBATCHES
from planting import blank_arenas, is_found_by, small_arenas, without_twins
from seen_before import SeenBefore
from test_planted import CLIENTS, EVENTS_MAX, NEITHER, Find, first_failure

from tests.sim.scenario_draw import has_microbatches, has_pictures, speculates
from vnext.state.store import columns, columns_numpy

NUMBER_OF = {bug.name: number for number, bug in enumerate(COMPILED_BUGS, start=1)}


@pytest.fixture(scope="module")
def variants(tmp_path_factory: pytest.TempPathFactory) -> Variants:
    return Variants(COMPILED_BUGS, tmp_path_factory.mktemp("planted"))


@pytest.fixture(scope="module")
def seen(pytestconfig: pytest.Config) -> SeenBefore:
    return SeenBefore(pytestconfig.getoption("--rewrite"))


def hunt(variants: Variants, number: int, seeds, events_max: int = EVENTS_MAX) -> Find | None:
    has_twin = not number or COMPILED_BUGS[number - 1].file == "_open_blocks.c"
    twins = nullcontext() if has_twin else without_twins()
    with small_arenas(), blank_arenas(NEITHER), variants.planted(number), twins:
        return first_failure(seeds, events_max)


@pytest.mark.parametrize("bug", COMPILED_BUGS, ids=lambda bug: bug.name)
def test_a_bug_in_c_is_found(bug: CompiledBug, variants: Variants, seen: SeenBefore) -> None:
    seeds = seen.seeds("compiled", bug.name)
    kinds = ((DRAFTS, speculates), (MICROBATCHES, has_microbatches), (INPUTS, has_pictures))
    shows = next((shows for bugs, shows in kinds if bug in bugs), None)
    found = hunt(variants, NUMBER_OF[bug.name], filter(shows, seeds) if shows else seeds)
    if found is not None:
        seen.keep("compiled", bug.name, found.seed, found.events)
    assert found is not None, f"{EVENTS_MAX} events of {CLIENTS} clients and nobody noticed: a law or a fault is missing"
    assert is_found_by(found.error, bug.found_by), f"seed {found.seed} failed otherwise: {found.error!r}"


def test_without_a_bug_nothing_is_found(variants: Variants) -> None:
    assert hunt(variants, 0, count(), 3_000) is None


def test_the_product_has_no_switch() -> None:
    if columns.impl is columns_numpy:
        pytest.skip("the compiled forms were not built: run python setup.py build_ext --inplace")
    assert not hasattr(columns.impl, "plant") and len(NUMBER_OF) == len(COMPILED_BUGS) >= 60
