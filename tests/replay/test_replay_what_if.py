"""vnext-replay what-if: a log comes out again on its own times; the model knows what it should; advice follows the numbers."""

from __future__ import annotations

import json
from collections import deque
from pathlib import Path

import numpy as np
import pytest
from log_drive import record, small_config, started
from msgspec.structs import replace

from vnext.replay.cli import main
from vnext.replay.source import UnusableLog, open_log
from vnext.replay.step_noise import Noise, misfit, noise
from vnext.replay.step_times import features_of, fit, recorded
from vnext.replay.verify import verify
from vnext.replay.what_if import OPTIONS, Objective, candidates, objective_of, timed, what_if
from vnext.replay.what_if_run import as_recorded, rerun, retrace
from vnext.runtime.recorder import Recorder
from vnext.runtime.settings import EngineSettings
from vnext.sched.schedule import schedule
from vnext.sched.sim.chance import Chance
from vnext.state.config import SchedulerConfig
from vnext.state.digest import digest
from vnext.state.events import AnyEvent, PrefixCacheReset, RequestAborted, RequestArrived, StepCommitted, pack_tokens
from vnext.state.log import segment_name
from vnext.state.params import Sampling
from vnext.state.reduce import reduce, start
from vnext.state.stamps import MAGIC, STAMPS_SUFFIX, head, stamp
from vnext.state.state import Flight, State

BASE_US, TOKEN_US, KNEE_TOKENS, BEYOND_US, CONTEXT_US = 2_000.0, 15.0, 24, 40.0, 1.5
EMPTY_SEGMENT = segment_name(0).split(".")[0] + STAMPS_SUFFIX


def real_config(**changes) -> SchedulerConfig:
    fields = dict(block_count=60, running_max=6, batch_tokens_max=40, pipeline_depth=2, vocab_size=50)
    return small_config(**(fields | changes))


def true_us(flight: Flight) -> float:
    """What a step takes: flat up to a knee, steeper beyond, and dearer with more context."""
    tokens, _, context, _ = features_of(flight).tolist()
    return BASE_US + TOKEN_US * tokens + BEYOND_US * max(tokens - KNEE_TOKENS, 0) + CONTEXT_US * context


class Machine:
    """An engine on a clock of its own, written from scratch: turns as the engine core takes them, frames with stamps."""

    def __init__(self, log_dir: Path, config: SchedulerConfig, seed: int, gap_us: int, noise_percent: int, privacy: str) -> None:
        self.recorder = Recorder.open(log_dir, started(config, 1), privacy)
        self.state: State = start(started(config, 1))
        self.chance, self.gap_us, self.noise_percent = Chance(seed), gap_us, noise_percent
        self.now_us, self.device_us = 0.0, 0.0
        self.ends: deque[float] = deque()
        self.stamps = bytearray(head.pack(MAGIC, 10**18, 5 * 10**9))
        self.frame: list[tuple[AnyEvent, State]] = []
        self.stops: list[int] = []

    def fold(self, event: AnyEvent) -> None:
        self.frame.append((event, self.state))
        self.state = reduce(self.state, event)

    def write(self) -> None:
        if self.frame:
            events, befores = zip(*self.frame)
            self.recorder.append(events, befores, digest(self.state))
            self.stamps += stamp.pack(self.state.sequence, 5 * 10**9 + round(self.now_us * 1000))
            self.frame = []

    def run(self, arrivals: int) -> None:
        coming = deque(self.times(arrivals))
        while coming or self.ends:
            self.now_us = min(coming[0] if coming else 1e18, self.ends[0] if self.ends else 1e18)
            while coming and coming[0] <= self.now_us:
                coming.popleft()
                self.arrive()
            if self.ends and self.ends[0] <= self.now_us:
                self.commit()
            while (plan := schedule(self.state)) is not None:
                self.fold(plan)
                self.write()
                noise = 1 + (self.chance.below(2001) - 1000) / 1000 * self.noise_percent / 100
                self.device_us = max(self.now_us, self.device_us) + round(noise * true_us(self.state.flights[-1]))
                self.ends.append(self.device_us)
            self.write()
        self.recorder.close()

    def times(self, arrivals: int) -> list[float]:
        at, found = 0, []
        for _ in range(arrivals):
            at += self.chance.below(2 * self.gap_us)
            found.append(float(at))
        return found

    def arrive(self) -> None:
        chance = self.chance
        prompt = [1 + chance.below(3) for _ in range(chance.between(1, 30))]
        sampling = Sampling(seed=0, max_tokens=chance.between(1, 20))
        id_ = self.state.next_id
        self.fold(RequestArrived(id=id_, name=str(id_), prompt=pack_tokens(prompt), sampling=sampling, priority=id_ % 3, arrival_ns=0))
        if chance.happens(4) and id_ > 2:
            self.fold(RequestAborted(ids=(chance.below(id_),), reason="client"))
        if chance.happens(3):
            self.fold(PrefixCacheReset())

    def commit(self) -> None:
        self.ends.popleft()
        flight = self.state.flights[0]
        tokens = [self.chance.below(50) for _ in range(int(flight.samples.sum()))]
        self.fold(StepCommitted(step=flight.step, tokens=pack_tokens(tokens)))


def machine_log(log_dir: Path, config=None, seed=1, arrivals=80, gap_us=2_500, noise_percent=0, privacy="full") -> Path:
    machine = Machine(log_dir, config or real_config(), seed, gap_us, noise_percent, privacy)
    machine.run(arrivals)
    (log_dir / EMPTY_SEGMENT).write_bytes(machine.stamps)
    assert verify(open_log(log_dir)).same
    return log_dir


# ---- the log comes out again -------------------------------------------------------------------------------------


@pytest.mark.parametrize("privacy", ["full", "shape"])
@pytest.mark.parametrize(
    "changes", [{}, {"pipeline_depth": 1}, {"pipeline_depth": 3, "block_count": 16}, {"policy": "priority", "block_count": 16}]
)
def test_an_unchanged_configuration_gives_the_log_again(tmp_path, changes, privacy):
    """On a clock of their own, with recorded times: every event, in order, to the last one."""
    log = open_log(machine_log(tmp_path / "log", real_config(**changes), noise_percent=20, privacy=privacy))
    taken = recorded(log)
    again = rerun(taken, log.header.started, log.header.started.config, as_recorded(taken), exact=True)
    assert again.events == taken.events and len(taken.events) > 300
    assert retrace(taken, log.header.started).events == taken.events
    assert changes.get("block_count", 60) > 16 or again.preemptions > 0


def test_another_configuration_gives_another_run_that_keeps_every_promise(tmp_path):
    log = open_log(machine_log(tmp_path / "log"))
    taken = recorded(log)
    config = real_config(running_max=2)
    ran = rerun(taken, log.header.started, config, as_recorded(taken))
    assert ran.steps > len(taken.entries) and ran.refused == 0
    told = {id_: len(tokens) for id_, tokens in taken.answers.items()}
    whole = [served.tokens for served in ran.served if served.finished]
    assert len(ran.served) == sum(isinstance(event, RequestArrived) for event in taken.events)
    assert sum(whole) == pytest.approx(sum(told.values()), rel=0.1)


# ---- the model ---------------------------------------------------------------------------------------------------


def test_the_model_learns_what_is_piecewise_linear(tmp_path):
    taken = recorded(open_log(machine_log(tmp_path / "log", arrivals=300, noise_percent=2)))
    model = fit(taken.features, taken.step_us)
    assert model.error_p50 < 0.03 and model.error_p99 < 0.1
    fast = [model.predict(row[None])[0] for row in taken.features[:20]]
    slow = model.predict(taken.features[:20])
    assert np.allclose(fast, slow)


def test_one_step_is_predicted_as_many_are(tmp_path):
    config = real_config()
    taken = recorded(open_log(machine_log(tmp_path / "log", config)))
    model = fit(taken.features, taken.step_us)
    for entries, features in zip(taken.entries[:50], taken.features):
        flight = Flight(0, entries, np.ones(entries.shape[1], dtype=bool), int(entries[3].sum()))
        assert model.step_us(flight) == pytest.approx(model.predict(features[None])[0])


def test_a_few_strange_steps_do_not_bend_the_model(tmp_path):
    taken = recorded(open_log(machine_log(tmp_path / "log", arrivals=200)))
    strange = taken.step_us.copy()
    strange[::50] *= 30
    straight, bent = fit(taken.features, taken.step_us), fit(taken.features, strange)
    one, other = straight.predict(taken.features), bent.predict(taken.features)
    assert np.median(np.abs(one - other) / one) < 0.05
    clock, total_us = timed(bent, replace(taken, step_us=strange, overhead_us=2.0)), 0.0
    for entries in taken.entries:
        total_us = clock(Flight(0, entries, np.ones(entries.shape[1], dtype=bool), int(entries[3].sum())), total_us)
    assert total_us == pytest.approx(strange.sum() + 2.0 * len(strange)), "a run meets the hiccups that the model left out"


def test_a_pause_is_as_long_for_a_large_step_as_for_a_small_one(tmp_path):
    """A step that took 300 times as long as usual did not compute 300 times as much: another in its place takes that longer."""
    taken = recorded(open_log(machine_log(tmp_path / "log", arrivals=200)))
    model = fit(taken.features, taken.step_us)
    usual_us = model.predict(taken.features)
    small, large = int(usual_us.argmin()), int(usual_us.argmax())
    assert usual_us[large] > 1.5 * usual_us[small]
    paused = replace(taken, features=taken.features[[small]], step_us=300 * usual_us[[small]], overhead_us=0.0)
    entries = taken.entries[large]
    flight = Flight(0, entries, np.ones(entries.shape[1], dtype=bool), int(entries[3].sum()))
    assert timed(model, paused)(flight, 0.0) == pytest.approx(2 * usual_us[large] + 298 * usual_us[small])


def test_equal_steps_tell_how_good_a_model_can_be():
    """Forty kinds of steps, fifty of each, up to 10 % around what they take; one of a kind of its own says nothing."""
    chance = np.random.default_rng(1)
    kinds = np.repeat(chance.integers(1, 50, (40, 2)), 50, axis=0)
    features = np.column_stack([kinds, 100 * kinds[:, :1], 300 * kinds[:, 1:]]).astype(float)
    exact = 1000.0 + 10 * kinds[:, 0]
    assert noise(features, exact) == Noise(steps=2000, p50=0.0, p90=0.0, p99=0.0)
    found = noise(features, exact * chance.uniform(0.9, 1.1, 2000))
    assert found.p50 == pytest.approx(0.05, abs=0.01) and 0.08 < found.p90 < found.p99 < 0.13
    one, own = exact * chance.uniform(0.9, 1.1, 2000), misfit(features, exact * chance.uniform(0.9, 1.1, 2000), 1.2 * exact)
    assert misfit(features, one, exact).p99 < 0.06 and own.steps == 2000 and own.p50 == pytest.approx(0.2, abs=0.03)
    assert noise(features[::50] * np.arange(1, 41)[:, None], exact[::50]).steps == 0
    assert noise(features[:0], exact[:0]).steps == 0


def test_what_the_model_says_is_what_happens(tmp_path):
    """The machine run with another configuration feels as what-if said from the first one's log."""
    first = machine_log(tmp_path / "first", arrivals=200, gap_us=4_000)
    second = machine_log(tmp_path / "second", real_config(running_max=2), arrivals=200, gap_us=4_000)
    said = what_if(first, candidates(["running_max=2"], []), Objective()).runs[0]
    happened = what_if(second, [], Objective()).recorded
    assert said.tokens_s == pytest.approx(happened.tokens_s, rel=0.15)
    assert said.itl_ms[0] == pytest.approx(happened.itl_ms[0], rel=0.15)


# ---- the command -------------------------------------------------------------------------------------------------


def test_a_sweep_recommends_what_meets_the_objective(tmp_path, capsys):
    log_dir = machine_log(tmp_path / "log", real_config(running_max=1), arrivals=60, gap_us=12_000)
    arguments = ["what-if", str(log_dir), "--sweep", "running_max=1,2,6", "--slo", "ttft=60ms,itl=50ms"]
    assert main([*arguments, "--json"]) == 1
    answer = json.loads(capsys.readouterr().out)
    assert answer["recommended"] == "running_max=6" and answer["reproduced"] == answer["events"]
    met = [run["met"] for run in answer["runs"]]
    assert met == sorted(met) and met[0] < 0.8 < met[-1] and met[0] == pytest.approx(answer["unchanged"]["met"])
    assert answer["unchanged"]["tokens_s"] == pytest.approx(answer["recorded"]["tokens_s"], rel=0.05)
    assert main([*arguments, "--jobs", "2", "--json"]) == 1
    assert json.loads(capsys.readouterr().out) == answer
    assert main(arguments) == 1
    text = capsys.readouterr().out
    assert "set running_max=6" in text and "█" in text and "the log comes out again" in text


def test_nothing_better_is_said_so(tmp_path, capsys):
    log_dir = machine_log(tmp_path / "log", arrivals=30)
    assert main(["what-if", str(log_dir), "--set", "running_max=1"]) == 0
    assert "leave it as it is" in capsys.readouterr().out


def test_candidates_are_all_with_all():
    assert candidates([], []) == []
    found = candidates(["policy=priority"], ["running_max=1,2", "prefix_caching=true,false"])
    assert len(found) == 4 and found[1] == (("policy", "priority"), ("running_max", 1), ("prefix_caching", False))
    assert objective_of("ttft=0.2s,itl=50ms") == Objective(ttft_us=200_000.0, itl_us=50_000.0)


def test_settings_may_have_the_names_that_the_server_knows():
    assert set(OPTIONS) <= set(EngineSettings.__struct_fields__)
    assert candidates(["max_num_seqs=4", "policy=fcfs"], ["--max-model-len=64"]) == candidates(
        ["running_max=4", "scheduling-policy=fcfs"], ["model_len_max=64"]
    )


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--set", "nothing=1"], "there is no setting 'nothing'"), (["--set", "running_max"], "write name=value"),
        (["--set", "running_max=many"], "is no value"), (["--set", "running_max=0"], "cannot work"),
        (["--set", "policy=mine"], "there is no policy"), (["--slo", "fast"], "is no objective"),
        (["--set", "running_max=1", "--sweep", "running_max=1,2"], "name each setting once"), (["--jobs", "0"], "at least 1"),
    ],
)  # fmt: skip
def test_bad_inputs_are_one_sentence(tmp_path, capsys, options, words):
    log_dir = machine_log(tmp_path / "log", arrivals=20)
    assert main(["what-if", str(log_dir), *options]) == 2
    assert words in capsys.readouterr().err


def test_a_log_without_times_cannot_be_asked(tmp_path):
    with pytest.raises(UnusableLog, match="has no step times"):
        recorded(open_log(record(tmp_path / "log")))
