"""vnext-replay what-if: a log comes out again on its own times; the model knows what it should; advice follows the numbers."""

from __future__ import annotations

import json
from collections import deque
from pathlib import Path

import numpy as np
import pytest
from log_drive import record, small_config, started

from vnext.log.codec import segment_name
from vnext.log.timestamps import MAGIC, STEP_BIT, TIMESTAMPS_SUFFIX, head, stamp
from vnext.replay.answers.slices import cut
from vnext.replay.cli.main import main
from vnext.replay.futures import recording
from vnext.replay.futures.ground import ground_of, timed
from vnext.replay.futures.recording import kinds_of, recorded
from vnext.replay.futures.step_times import STRETCH_STEPS, Drawn, Noise, Pace, features_of, fit, misfit, noise, stretches
from vnext.replay.futures.what_if import OPTIONS, candidates, what_if
from vnext.replay.futures.what_if_run import Rerun, as_recorded, rerun, retrace
from vnext.replay.reading.index import Index
from vnext.replay.reading.objective import Objective, objective_of
from vnext.replay.reading.source import UnusableLog, open_log
from vnext.replay.reading.verify import verify
from vnext.runtime.protocol.settings import EngineSettings
from vnext.runtime.record.recorder import Recorder
from vnext.sched.schedule import schedule
from vnext.sim.rng import Rng
from vnext.state.config import SchedulerConfig
from vnext.state.digest import digest
from vnext.state.events import AnyEvent, PrefixCacheReset, RequestAborted, RequestArrived, StepCommitted, pack_tokens
from vnext.state.params import Sampling
from vnext.state.reduce import reduce, start
from vnext.state.state import State, StepInFlight

BASE_US, TOKEN_US, KNEE_TOKENS, BEYOND_US, CONTEXT_US = 2_000.0, 15.0, 24, 40.0, 1.5
TURN_US = np.array([[100.0, 700.0], [300.0, 1_900.0]])
"""What a turn costs beside its step, as `kinds_of` tells turns apart."""
EMPTY_SEGMENT = segment_name(0).split(".")[0] + TIMESTAMPS_SUFFIX


def real_config(**changes) -> SchedulerConfig:
    fields = dict(page_count=60, max_num_seqs=6, max_num_batched_tokens=40, pipeline_depth=2, vocab_size=50)
    return small_config(**(fields | changes))


def true_us(scheduled: StepInFlight) -> float:
    """What a step takes: flat up to a knee, steeper beyond, and dearer with more context."""
    tokens, _, context, _ = features_of(scheduled).tolist()
    return BASE_US + TOKEN_US * tokens + BEYOND_US * max(tokens - KNEE_TOKENS, 0) + CONTEXT_US * context


class Machine:
    """An engine on a clock of its own, written from scratch: turns as the engine core takes them, frames with stamps."""

    is_late = False
    """Now and then it comes to the results long after they are there, and takes all at once."""

    turn_us, pace = np.zeros((2, 2)), 1.0

    def __init__(self, log_dir: Path, config: SchedulerConfig, seed: int, gap_us: int, noise_percent: int, privacy: str) -> None:
        self.recorder = Recorder.open(log_dir, started(config, 1), privacy)
        self.state: State = start(started(config, 1))
        self.rng, self.gap_us, self.noise_percent = Rng(seed), gap_us, noise_percent
        self.now_us, self.device_us, self.committed_us = 0.0, 0.0, 0.0
        self.ends: deque[float] = deque()
        self.timestamps = bytearray(head.pack(MAGIC, 10**18, 5 * 10**9))
        self.frame: list[tuple[AnyEvent, State]] = []
        self.begun = set[int]()

    def fold(self, event: AnyEvent) -> None:
        self.frame.append((event, self.state))
        self.state = reduce(self.state, event)

    def write(self) -> None:
        if self.frame:
            events, befores = zip(*self.frame)
            self.recorder.append(events, befores, digest(self.state))
            self.timestamps += stamp.pack(self.state.sequence, 5 * 10**9 + round(self.now_us * 1000))
            self.frame = []

    def run(self, arrivals: int) -> None:
        coming = deque(self.times(arrivals))
        while coming or self.ends:
            self.now_us = min(coming[0] if coming else 1e18, self.ends[0] if self.ends else 1e18)
            if self.is_late and self.rng.happens(10):
                self.now_us += 3 * BASE_US
            while coming and coming[0] <= self.now_us:
                coming.popleft()
                self.arrive()
            while self.ends and self.ends[0] <= self.now_us:
                self.commit()
            while (plan := schedule(self.state)) is not None:
                self.fold(plan)
                self.write()
                noise = 1 + (self.rng.below(2001) - 1000) / 1000 * self.noise_percent / 100
                self.begin(self.state.in_flight[-1], noise)
            self.write()
        self.recorder.close()

    def begin(self, scheduled: StepInFlight, noise: float) -> None:
        """The step ends when it was computed and its turn is over; rank 0 was busy with the step alone."""
        has_waited, busy_us = not self.ends and self.now_us > self.committed_us, round(self.pace * noise * true_us(scheduled))
        begins = scheduled.tokens > len(scheduled.samples) and not self.begun.issuperset(scheduled.ids.tolist())
        self.begun.update(scheduled.ids.tolist() if begins else ())
        turn_us = self.turn_us[int(has_waited), int(begins)]
        self.timestamps += stamp.pack(STEP_BIT | scheduled.step, busy_us * 1000)
        self.device_us = max(self.now_us, self.device_us) + busy_us + turn_us
        self.ends.append(self.device_us)

    def times(self, arrivals: int) -> list[float]:
        at, found = 0, []
        for _ in range(arrivals):
            at += self.rng.below(2 * self.gap_us)
            found.append(float(at))
        return found

    def arrive(self) -> None:
        rng = self.rng
        prompt = [1 + rng.below(3) for _ in range(rng.between(1, 30))]
        sampling = Sampling(seed=0, max_tokens=rng.between(1, 20))
        id_ = self.state.next_id
        self.fold(
            RequestArrived(
                id=id_, name=str(id_), prompt=pack_tokens(prompt), sampling=sampling, priority=id_ % 3, arrival_ns=0
            )
        )
        if rng.happens(4) and id_ > 2:
            self.fold(RequestAborted(ids=(rng.below(id_),), reason="client"))
        if rng.happens(3):
            self.fold(PrefixCacheReset())

    def commit(self) -> None:
        self.ends.popleft()
        self.committed_us = self.now_us
        scheduled = self.state.in_flight[0]
        tokens = [self.rng.below(50) for _ in range(int(scheduled.samples.sum()))]
        self.fold(StepCommitted(step=scheduled.step, tokens=pack_tokens(tokens)))


def machine_log(log_dir: Path, config=None, seed=1, arrivals=80, gap_us=2_500, noise_percent=0, privacy="full") -> Path:
    machine = Machine(log_dir, config or real_config(), seed, gap_us, noise_percent, privacy)
    machine.run(arrivals)
    (log_dir / EMPTY_SEGMENT).write_bytes(machine.timestamps)
    assert verify(open_log(log_dir)).same
    return log_dir


# ---- the log comes out again -------------------------------------------------------------------------------------


@pytest.mark.parametrize("privacy", ["full", "shape"])
@pytest.mark.parametrize(
    "changes",
    [{}, {"pipeline_depth": 1}, {"pipeline_depth": 3, "page_count": 16}, {"policy": "priority", "page_count": 16}],
)
def test_an_unchanged_configuration_gives_the_log_again(tmp_path, changes, privacy):
    """On a clock of their own, with recorded times: every event, in order, to the last one."""
    log = open_log(machine_log(tmp_path / "log", real_config(**changes), noise_percent=20, privacy=privacy))
    taken = recorded(log)
    again = rerun(taken, log.header.started, log.header.started.config, as_recorded(taken), exact=True)
    assert again.events == taken.events and len(taken.events) > 300
    assert retrace(taken, log.header.started).events == taken.events
    assert changes.get("page_count", 60) > 16 or again.preemptions > 0


def test_another_configuration_gives_another_run_that_keeps_every_promise(tmp_path):
    log = open_log(machine_log(tmp_path / "log"))
    taken = recorded(log)
    config = real_config(max_num_seqs=2)
    ran = rerun(taken, log.header.started, config, as_recorded(taken))
    assert ran.steps > len(taken.entries) and ran.refused == 0
    reported = {id_: len(tokens) for id_, tokens in taken.answers.items()}
    whole = [served.tokens for served in ran.served if served.finished]
    assert len(ran.served) == sum(isinstance(event, RequestArrived) for event in taken.events)
    assert sum(whole) == pytest.approx(sum(reported.values()), rel=0.1)


@pytest.mark.parametrize("share", [0.0, 0.4])
def test_tokens_of_a_step_are_those_of_its_requests_one_by_one(tmp_path, monkeypatch, share):
    """Without drafts a step's tokens are found at once; also of requests that live where a ring begins, or have ended."""
    path = machine_log(tmp_path / "log", real_config(pipeline_depth=3, page_count=24), arrivals=60)
    log = open_log(ring_of(path, tmp_path / "ring", share) if share else path)
    taken, at_once, compared, places = recorded(log), Rerun._sampled, [], []

    def checked(course: Rerun, ids: np.ndarray, ends: np.ndarray) -> list[int]:
        tokens, one_by_one = at_once(course, ids, ends), [course._run(*pair, 0)[0] for pair in zip(ids.tolist(), ends.tolist())]
        assert [[token] for token in tokens] == one_by_one
        compared.extend(tokens)
        places.extend(id_ in course.state.requests for id_ in ids.tolist())
        return tokens

    monkeypatch.setattr(Rerun, "_sampled", checked)
    rerun(taken, log.header.started, real_config(pipeline_depth=3, page_count=40, max_num_seqs=3), as_recorded(taken))
    assert len(compared) > 200 and len(set(compared)) > 20 and bool(taken.lives) == bool(share) and set(places) == {True, False}


# ---- a ring that has lost its beginning --------------------------------------------------------------------------


def ring_of(log_dir: Path, out: Path, share: float = 0.4) -> Path:
    """The log from a step on, behind a snapshot."""
    index = Index(open_log(log_dir))
    cut(index, out, int(share * index.last.planned), None)
    return out


@pytest.mark.parametrize("privacy", ["full", "shape"])
@pytest.mark.parametrize(
    "changes", [{}, {"pipeline_depth": 3, "page_count": 16}, {"policy": "priority", "page_count": 16}, {"windows": (8,)}]
)
def test_a_ring_comes_out_again_from_its_snapshot_on(tmp_path, changes, privacy):
    whole = machine_log(tmp_path / "log", real_config(**changes), noise_percent=20, privacy=privacy)
    log = open_log(ring_of(whole, tmp_path / "ring"))
    taken = recorded(log)
    assert log.header.index and taken.lives and taken.first.in_flight and len(taken.events) > 150
    assert retrace(taken, log.header.started).events == taken.events
    again = rerun(taken, log.header.started, log.header.started.config, as_recorded(taken), exact=True)
    assert again.events == taken.events


@pytest.mark.parametrize("seed", range(3))
def test_requests_that_live_where_a_ring_begins_go_on_under_other_settings(tmp_path, seed, capsys):
    """Each is told all that it had left, once; and what clients feel is what the ring shows."""
    ring = ring_of(machine_log(tmp_path / "log", real_config(page_count=200), seed=seed, arrivals=150), tmp_path / "ring")
    taken = recorded(open_log(ring))
    started = open_log(ring).header.started
    for changes in (
        {},
        {"max_num_seqs": 2},
        {"page_count": 24},
        {"max_num_batched_tokens": 16, "long_prefill_token_threshold": 4},
    ):
        config = real_config(**{"page_count": 200} | changes)
        ran = rerun(taken, started, config, as_recorded(taken))
        older = [served for served in ran.served if served.is_older]
        assert len(older) == len(taken.lives) > 2 and ran.refused == 0
        for life, served in zip(sorted(taken.lives, key=lambda life: not life.last), older):
            assert served.tokens == len(taken.answers[life.arrival.id]) or not served.finished
    answer = what_if(ring, candidates(["max_num_seqs=2"], []), Objective())
    assert answer.reproduced == answer.events and answer.revived == len(taken.lives)
    assert answer.unchanged.requests == answer.recorded.requests < 150
    assert answer.unchanged.tokens_s == pytest.approx(answer.recorded.tokens_s, rel=0.1)
    assert answer.unchanged.ttft_ms[0] == pytest.approx(answer.recorded.ttft_ms[0], rel=0.2)
    assert main(["what-if", str(ring)]) == 0
    assert f"the log begins in mid-run: {len(taken.lives)} requests that lived there continue" in capsys.readouterr().out


# ---- the model ---------------------------------------------------------------------------------------------------


def test_the_model_learns_what_is_piecewise_linear(tmp_path):
    taken = recorded(open_log(machine_log(tmp_path / "log", arrivals=300, noise_percent=2)))
    model = fit(taken.features, taken.step_us, taken.began_us)
    assert model.error_p50 < 0.03 and model.error_p99 < 0.1
    fast = [model.predict(row[None])[0] for row in taken.features[:20]]
    slow = model.predict(taken.features[:20])
    assert np.allclose(fast, slow)


def test_one_step_is_predicted_as_many_are(tmp_path):
    config = real_config()
    taken = recorded(open_log(machine_log(tmp_path / "log", config)))
    model = fit(taken.features, taken.step_us, taken.began_us)
    for entries, features in zip(taken.entries[:50], taken.features):
        scheduled = StepInFlight(0, entries, np.ones(entries.shape[1], dtype=bool), int(entries[3].sum()))
        assert model.single()(scheduled) == pytest.approx(model.predict(features[None])[0])


def test_a_few_strange_steps_do_not_bend_the_model(tmp_path):
    taken = recorded(open_log(machine_log(tmp_path / "log", arrivals=200)))
    strange = taken.step_us.copy()
    strange[::50] *= 30
    straight, bent = fit(taken.features, taken.step_us, taken.began_us), fit(taken.features, strange, taken.began_us)
    one, other = straight.predict(taken.features), bent.predict(taken.features)
    assert np.median(np.abs(one - other) / one) < 0.05


@pytest.mark.parametrize("growth", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("seed", range(2))
def test_a_slow_machine_is_not_taken_for_the_cost_of_size(seed, growth):
    """Half seconds at a quarter of the speed, in which a queue grows: what 32 tokens cost is what the fast ones show."""
    rng = np.random.default_rng(seed)
    slow, now_us, steps = rng.choice([1.0, 1.0, 1.0, 4.0], 40), 0.0, []
    while now_us < 20e6:
        pace = slow[int(now_us // 500_000) % 40]
        tokens = max(1, rng.poisson(4 * pace**growth))
        took_us = (400 + 20 * tokens) * pace * rng.uniform(0.8, 1.2)
        steps.append((tokens, took_us, now_us + 170_000))
        now_us += took_us
    tokens, took_us, began_us = np.array(steps).T
    features = np.outer([1.0, 8.0, 32.0], [1, 1, 30, 30])
    model = fit(np.outer(tokens, [1, 1, 30, 30]), took_us, began_us)
    assert model.predict(features) == pytest.approx([420.0, 560.0, 1040.0], rel=0.2)


def test_larger_steps_than_any_of_the_log_take_longer_by_their_size(tmp_path):
    """Two steps beyond a knot, one of them held up by the machine, once said that the next size takes a minute."""
    rng = np.random.default_rng(2)
    tokens = np.concatenate([rng.integers(1, 9, 3000), rng.integers(100, 250, 60), [256.0, 257.0]]).astype(float)
    features = np.column_stack([tokens, np.minimum(tokens, 8), 20 * tokens, 50 * tokens])
    times = (300 + 35 * tokens) * rng.uniform(0.8, 1.25, len(tokens))
    times[-1] *= 5
    model = fit(features, times, np.cumsum(times) - times)
    assert (model.weights >= 0).all()
    largest, twice, usual = model.predict(
        np.array([[257.0, 8, 5140, 12850], [514, 16, 10280, 25700], [128, 8, 2560, 6400]])
    ).tolist()
    assert largest < twice <= 2 * largest < 5 * 300 * 35 and usual == pytest.approx(300 + 35 * 128, rel=0.2)


def test_slow_seconds_are_drawn_as_well_as_slow_moments():
    """A log whose first half is twice as slow: its stretches differ from seed to seed, as another run's halves would."""
    took, means = np.where(np.arange(4000) < 2000, 200.0, 100.0), []
    for seed in range(1, 41):
        drawn = Drawn(np.zeros(4000, int), took[stretches(4000, seed)], np.full(4000, 100.0))
        means.append(np.mean([drawn.end_us(0.0, 100.0, 0) for _ in range(4000)]))
    assert np.std(means) > 10 * 50 / np.sqrt(4000) and np.mean(means) == pytest.approx(150, abs=10)
    assert len(stretches(70, 1)) == 70 and set(np.diff(stretches(70, 1))[: STRETCH_STEPS - 1]) <= {1, -69}


def test_a_step_meets_the_hiccups_of_its_moment():
    """Ten steps of a millisecond, the fifth of which was held up for seven: so is whatever runs then, and for as long."""
    began = np.arange(10) * 1000.0 + np.where(np.arange(10) > 4, 7000.0, 0.0)
    ends = began + np.where(np.arange(10) == 4, 8000.0, 1000.0)
    pace = Pace(began, ends, np.full(10, 1000.0))
    assert [pace.end_us(begin, 1000.0, 0) for begin in began] == ends.tolist()
    assert pace.end_us(3000.0, 2000.0, 0) == 12000.0 and pace.end_us(0.0, 2000.0, 0) == 2000.0
    assert pace.end_us(2000.0, 500.0, 0) == 2500.0 and pace.end_us(16500.0, 1000.0, 0) == 17500.0, "its time begins anew"
    waited = Pace(np.array([0.0, 5000.0]), np.array([2000.0, 7000.0]), np.full(2, 1000.0))
    assert waited.end_us(3000.0, 1000.0, 0) == 5000.0, "at half its usual pace, also where nothing ran"


def test_hiccups_that_are_drawn_are_those_of_steps_of_that_kind():
    """One kind takes what is usual, the other three times as long: twice as a factor, once more as a pause."""
    kinds = np.arange(400) % 2
    drawn = Drawn(kinds, np.where(kinds == 0, 100.0, 3000.0), np.where(kinds == 0, 100.0, 1000.0))
    assert {drawn.end_us(5.0, 100.0, 0) for _ in range(50)} == {105.0}
    assert {drawn.end_us(0.0, 500.0, 1) for _ in range(50)} == {2000.0}


@pytest.mark.parametrize("seed", range(4))
def test_the_model_gives_a_noisy_log_again(tmp_path, monkeypatch, seed):
    """Under its own settings, at the machine's own pace: every event of the log, and every first token when it came."""
    monkeypatch.setattr(Machine, "is_late", seed > 1)
    monkeypatch.setattr(Machine, "turn_us", seed % 2 * TURN_US)
    path = machine_log(tmp_path / "log", arrivals=120, noise_percent=60, seed=seed)
    ground = ground_of(open_log(path))
    clock = timed(ground.model, ground.taken, ground.pace)
    again = rerun(ground.taken, ground.started, ground.started.config, clock, exact=True)
    assert again.events == ground.taken.events
    shown = what_if(path, [], Objective())
    assert shown.unchanged.ttft_ms == pytest.approx(shown.recorded.ttft_ms, rel=1e-3)


def test_a_turn_costs_what_is_usual_for_its_kind():
    """What lies beside the device is told by kinds: one number for all has first tokens too early."""
    began = np.arange(80) * 10.0 + np.repeat([0.0, 5.0], 40)
    tokens, requests = np.tile([3.0, 9.0], 40), np.full(80, 3.0)
    kinds = kinds_of(tokens > requests, began, np.concatenate([began[1:40], [400.0], began[40:] + 5.0]))
    assert kinds[0].tolist() == [0] * 40 + [1] * 40 and kinds[1].tolist() == [0, 1] * 40
    usual = np.array([[100.0, 300.0], [500.0, 900.0]])
    assert recording.overheads_of(kinds, usual[kinds]).tolist() == usual.tolist()
    rare = tuple(each[:45] for each in kinds)
    assert recording.overheads_of(rare, usual[rare]).tolist() == [[100.0, 300.0], [300.0, 300.0]], "a rare kind is as all are"


def test_a_log_tells_what_turns_cost_beside_their_steps(tmp_path, monkeypatch):
    """Of each kind, but for one that is rare; and a step's own time is what rank 0 was busy with it."""
    due_us = TURN_US.copy()
    due_us[1, 0] = TURN_US[0, 0]  # a prompt of one token where nothing ran: as all turns are
    monkeypatch.setattr(Machine, "turn_us", TURN_US)
    ground = ground_of(open_log(machine_log(tmp_path / "log", arrivals=200, gap_us=60_000)))
    taken = ground.taken
    assert np.abs(taken.overhead_us - due_us).max() < 1
    in_flight = [
        StepInFlight(0, entries, np.ones(entries.shape[1], dtype=bool), int(entries[3].sum()))
        for entries in taken.entries
    ]
    assert taken.step_us.tolist() == [round(true_us(scheduled)) for scheduled in in_flight]
    step_us, clocks = ground.model.single(), [timed(ground.model, taken, Steady()) for _ in range(2)]
    for scheduled, begins in zip(in_flight, taken.begins.tolist()):
        for waited, clock in enumerate(clocks):
            took_us = clock(scheduled, 5.0, bool(waited)) - 5.0
            assert took_us == pytest.approx(step_us(scheduled) + due_us[waited, int(begins)], abs=1)
    has_prompt = [scheduled.tokens > len(scheduled.samples) for scheduled in in_flight]
    assert sum(taken.begins.tolist()) < sum(has_prompt), "further chunks of a prompt cost no more than other turns"


class Steady:
    """A machine without hiccups."""

    def end_us(self, begin_us: float, usual_us: float, _: int) -> float:
        return begin_us + usual_us


def test_equal_steps_tell_how_good_a_model_can_be():
    """Forty kinds of steps, fifty of each, up to 10 % around what they take; one of a kind of its own says nothing."""
    rng = np.random.default_rng(1)
    kinds = np.repeat(rng.integers(1, 50, (40, 2)), 50, axis=0)
    features = np.column_stack([kinds, 100 * kinds[:, :1], 300 * kinds[:, 1:]]).astype(float)
    exact = 1000.0 + 10 * kinds[:, 0]
    assert noise(features, exact) == Noise(steps=2000, p50=0.0, p90=0.0, p99=0.0)
    found = noise(features, exact * rng.uniform(0.9, 1.1, 2000))
    assert found.p50 == pytest.approx(0.05, abs=0.01) and 0.08 < found.p90 < found.p99 < 0.13
    one, own = exact * rng.uniform(0.9, 1.1, 2000), misfit(features, exact * rng.uniform(0.9, 1.1, 2000), 1.2 * exact)
    assert misfit(features, one, exact).p99 < 0.06 and own.steps == 2000 and own.p50 == pytest.approx(0.2, abs=0.03)
    assert noise(features[::50] * np.arange(1, 41)[:, None], exact[::50]).steps == 0
    assert noise(features[:0], exact[:0]).steps == 0


def test_what_the_model_says_is_what_happens(tmp_path):
    """The machine run with another configuration feels as what-if said from the first one's log."""
    first = machine_log(tmp_path / "first", arrivals=200, gap_us=4_000)
    second = machine_log(tmp_path / "second", real_config(max_num_seqs=2), arrivals=200, gap_us=4_000)
    said = what_if(first, candidates(["max_num_seqs=2"], []), Objective()).runs[0]
    happened = what_if(second, [], Objective()).recorded
    assert said.tokens_s == pytest.approx(happened.tokens_s, rel=0.15)
    assert said.itl_ms[0] == pytest.approx(happened.itl_ms[0], rel=0.15)


# ---- the command -------------------------------------------------------------------------------------------------


def test_a_sweep_recommends_what_meets_the_objective(tmp_path, capsys):
    log_dir = machine_log(tmp_path / "log", real_config(max_num_seqs=1), arrivals=60, gap_us=12_000)
    arguments = ["what-if", str(log_dir), "--sweep", "max_num_seqs=1,2,6", "--slo", "ttft=60ms,itl=50ms"]
    assert main([*arguments, "--json"]) == 1
    answer = json.loads(capsys.readouterr().out)
    assert answer["recommended"] == "max_num_seqs=6" and answer["reproduced"] == answer["events"]
    met = [run["met"] for run in answer["runs"]]
    assert met == sorted(met) and met[0] < 0.8 < met[-1] and met[0] == pytest.approx(answer["unchanged"]["met"])
    assert answer["unchanged"]["tokens_s"] == pytest.approx(answer["recorded"]["tokens_s"], rel=0.05)
    assert main([*arguments, "--jobs", "2", "--json"]) == 1
    assert json.loads(capsys.readouterr().out) == answer
    assert main(arguments) == 1
    text = capsys.readouterr().out
    assert "set max_num_seqs=6" in text and "█" in text and "the simulation reproduces the log" in text


def test_nothing_better_is_said_so(tmp_path, capsys):
    log_dir = machine_log(tmp_path / "log", arrivals=30)
    assert main(["what-if", str(log_dir), "--set", "max_num_seqs=1", "--slo", "ttft=50ms"]) == 0
    assert "leave it as it is: nothing that was tried is better" in capsys.readouterr().out


def test_without_an_objective_nothing_is_recommended(tmp_path, capsys):
    log_dir = machine_log(tmp_path / "log", real_config(max_num_seqs=1), arrivals=60, gap_us=12_000)
    arguments = ["what-if", str(log_dir), "--sweep", "max_num_seqs=2,6"]
    assert main(arguments) == 0
    text = capsys.readouterr().out
    assert "say what a request should feel, as in --slo" in text and "within the objective" not in text and " met " not in text
    assert main([*arguments, "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["recommended"] == "" and answer["unchanged"]["met"] is None and answer["runs"][0]["good_s"] is None


def test_a_gain_within_the_error_recommends_nothing(tmp_path):
    """A setting that changes nothing but the luck of when a pause comes, on a machine that takes half or twice as long as usual."""
    log_dir = machine_log(tmp_path / "log", real_config(max_num_seqs=5), arrivals=80, gap_us=3_000, noise_percent=95)
    unchanged = what_if(log_dir, [], Objective(ttft_us=20_000)).unchanged
    limit_us = 1000 * unchanged.ttft_ms[0]
    tried = candidates([], ["max_num_seqs=4,6", "max_num_batched_tokens=38,42"])
    answer = what_if(log_dir, tried, Objective(ttft_us=limit_us))
    assert answer.recommended == "" and any(run.met > answer.unchanged.met for run in answer.runs)
    assert "this log cannot tell" in answer.reason
    low, high = answer.unchanged.between.met
    assert low <= answer.unchanged.met <= high and high - low > 0.02
    assert all(run.met <= high for run in answer.runs)


def test_steps_larger_than_any_of_the_log_are_a_guess(tmp_path, capsys):
    log_dir = machine_log(tmp_path / "log", real_config(max_num_seqs=1), arrivals=40, gap_us=3_000)
    main(["what-if", str(log_dir), "--set", "max_num_seqs=6"])
    assert "of its steps are larger than any in this log, and their times are a guess" in capsys.readouterr().out


def test_candidates_are_all_with_all():
    assert candidates([], []) == []
    found = candidates(["policy=priority"], ["max_num_seqs=1,2", "prefix_caching=true,false"])
    assert len(found) == 4 and found[1] == (("policy", "priority"), ("max_num_seqs", 1), ("prefix_caching", False))
    assert objective_of("ttft=0.2s,itl=50ms") == Objective(ttft_us=200_000.0, itl_us=50_000.0)


def test_settings_may_have_the_names_that_the_server_knows():
    assert set(OPTIONS) <= set(EngineSettings.__struct_fields__)
    assert candidates(["max_num_seqs=4", "policy=fcfs"], ["--max-model-len=64"]) == candidates(
        ["max_num_seqs=4", "scheduling-policy=fcfs"], ["max_model_len=64"]
    )


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--set", "nothing=1"], "there is no setting 'nothing'"),
        (["--set", "max_num_seqs"], "write name=value"),
        (["--set", "max_num_seqs=many"], "is no value"),
        (["--set", "max_num_seqs=0"], "cannot work"),
        (["--set", "policy=mine"], "there is no policy"),
        (["--slo", "fast"], "is no objective"),
        (["--set", "max_num_seqs=1", "--sweep", "max_num_seqs=1,2"], "name each setting once"),
        (["--jobs", "0"], "at least 1"),
    ],
)
def test_bad_inputs_are_one_sentence(tmp_path, capsys, options, words):
    log_dir = machine_log(tmp_path / "log", arrivals=20)
    assert main(["what-if", str(log_dir), *options]) == 2
    assert words in capsys.readouterr().err


def test_a_log_without_times_cannot_be_asked(tmp_path):
    with pytest.raises(UnusableLog, match="has no step times"):
        recorded(open_log(record(tmp_path / "log")))
