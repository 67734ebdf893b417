"""What drafts cost, measured again while an engine serves: from the shortest steps, as an event, and decided by from then on."""

from __future__ import annotations

import numpy as np
import pytest
from core_drive import Engine, config_of, started_with
from msgspec.structs import replace
from test_core import make_bench, wish  # noqa: F401  a fixture
from toy_ranks import ToyExecutor

from vnext.log.codec import Frame
from vnext.replay.reading.source import open_log
from vnext.runtime.engine import draft_costs
from vnext.runtime.engine.draft_costs import INTERVAL, DraftCosts
from vnext.runtime.engine.process import measures_drafts
from vnext.runtime.protocol.settings import EngineSettings
from vnext.state.config import Speculation
from vnext.state.events import DraftCostsMeasured, StepCommitted
from vnext.state.state import StepInFlight

BUSY = Speculation(row_cost=900, step_cost=700, row_cost_many=1000)


def step_of(rows: int, drafts: int = 0, prompt: int = 0) -> StepInFlight:
    entries = np.zeros((4, rows), np.int64)
    entries[0] = range(rows)
    planned = np.array([drafts] + [0] * (rows - 1))
    return StepInFlight(0, entries, np.ones(rows, bool), rows + drafts + prompt, planned)


def served(costs: DraftCosts, seconds_of: dict[tuple[int, int], float], rounds: int = 40, noise: float = 0.0) -> None:
    """Steps of (rows, drafts), each of its time; with noise, only some are as short."""
    for turn in range(rounds):
        for (rows, drafts), seconds in seconds_of.items():
            commit = StepCommitted(step=0, tokens=b"", counts=bytes([1] * rows) if drafts else b"", drafted=bytes([drafts]) if drafts else b"")
            costs.took(step_of(rows, drafts), commit, seconds + (noise if turn % 5 else 0.0))


def state_with(speculation: Speculation) -> Engine:
    return Engine(speculation=speculation)


PLAIN = {(1, 0): 0.010, (4, 0): 0.013, (8, 0): 0.017}
CASES = [  # the times of steps, and the costs that they say; None where they say what was known
    (PLAIN, (100, 700, 1000)),
    (PLAIN | {(1, 2): 0.012}, (100, 0, 1000)),
    (PLAIN | {(1, 2): 0.014, (2, 2): 0.0165}, (100, 200, 1000)),
    (PLAIN | {(16, 0): 0.033}, (100, 700, 225)),
    ({(2, 0): 0.011, (6, 0): 0.015}, (100, 700, 1000)),
    ({(1, 0): 0.010, (8, 0): 0.010}, (0, 700, 1000)),
    ({(1, 0): 0.010, (8, 0): 0.073}, None),
    ({(8, 0): 0.017}, None),
    ({(7, 0): 0.016, (8, 0): 0.017}, None),
    ({(16, 0): 0.020, (32, 0): 0.040}, None),
]  # fmt: skip


@pytest.mark.parametrize("noise", [0.0, 0.5])
@pytest.mark.parametrize(("seconds_of", "expected"), CASES)
def test_the_shortest_steps_say_the_costs(seconds_of: dict[tuple[int, int], float], expected: tuple[int, int, int] | None, noise: float) -> None:
    costs, engine = DraftCosts(), state_with(BUSY)
    assert not costs.is_on
    served(costs, seconds_of, 1 + INTERVAL // len(seconds_of), noise)
    assert costs.is_on
    event = costs.next_event(engine.state)
    assert not costs.is_on, "until as many steps more have ended"
    if expected is None:
        assert event is None
        return
    assert event is not None and event == DraftCostsMeasured(
        row_cost=pytest.approx(expected[0], abs=40), step_cost=pytest.approx(expected[1], abs=60), row_cost_many=pytest.approx(expected[2], abs=90)
    )
    engine.fold(event)
    served(costs, seconds_of, 1 + INTERVAL // len(seconds_of), noise)
    assert costs.is_on and costs.next_event(engine.state) is None, "nothing new"


def test_steps_of_prompts_and_rare_ones_say_nothing() -> None:
    costs = DraftCosts()
    served(costs, {(1, 0): 0.010}, INTERVAL)
    served(costs, {(8, 0): 0.010}, 3)
    for _ in range(9):
        costs.took(step_of(4, prompt=100), StepCommitted(step=0, tokens=b""), 0.010)
    assert costs.measured(BUSY) == (900, 700, 1000)


def test_a_machine_that_has_become_slower_is_noticed() -> None:
    costs = DraftCosts()
    served(costs, {(1, 0): 0.010, (8, 0): 0.011}, 100)
    served(costs, {(1, 0): 0.020, (8, 0): 0.034}, 2_000)
    assert costs.measured(BUSY)[0] == pytest.approx(100, abs=5)


class TimedRanks(ToyExecutor):
    """Ranks whose steps take 10 ms and 1 ms a row more."""

    def receive(self) -> list:
        return [replace(each, seconds=0.009 + 0.001 * self.rows) for each in super().receive()]

    @property
    def rows(self) -> int:
        return len(self._states[0].rows)


def test_an_engine_records_it_and_decides_by_it(make_bench, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    monkeypatch.setattr(draft_costs, "INTERVAL", 20)
    bench = make_bench(TimedRanks(), speculation=BUSY, page_count=64)
    bench.core.measure_draft_costs()
    bench.say(bench.client(), *(wish(f"r{at}", [1, 2, 3], 12 + 10 * at) for at in range(4)))
    bench.turn(200)
    assert bench.core.state.config.speculation == replace(BUSY, row_cost=pytest.approx(100, abs=10))
    bench.core.shut_down()
    assert bench.verified()
    frames = [item.events for item in open_log(bench.log_dir).items() if isinstance(item, Frame)]
    (event,) = (event for events in frames for event in events if isinstance(event, DraftCostsMeasured))
    assert event.step_cost == 700


@pytest.mark.parametrize(
    ("config", "environment", "more", "expected"),
    [
        ('{"method": "ngram"}', {}, {}, True),
        ('{"method": "suffix"}', {"device": "cpu"}, {}, True),
        ('{"method": "ngram", "row_cost": 70}', {}, {}, False),
        ('{"method": "ngram"}', {"device": "cuda:0"}, {}, False),
        ('{"method": "ngram"}', {}, {"pipeline_parallel_size": 2}, False),
        ('{"method": "mtp"}', {}, {}, False),
        ("", {}, {}, False),
    ],
)
def test_where_it_is_measured(config: str, environment: dict[str, str], more: dict[str, int], expected: bool) -> None:
    started = replace(started_with(config_of()), environment=environment)
    assert measures_drafts(EngineSettings(speculative_config=config, **more), started) is expected
