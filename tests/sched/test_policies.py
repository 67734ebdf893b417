"""Policies: built-in and one's own, refused at the start in one sentence, lawful and finishing however wild their keys."""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec
import pytest
from core_drive import Engine, check_decision
from log_drive import record, small_config

from tests.sim.scenario_draw import scenario
from tests.sim.simulator import simulate
from vnext.replay.cli.main import main
from vnext.sched import deadline, ranking
from vnext.sched.policies import BUILT_IN, SAMPLES, Candidate, PolicyError, policy_of
from vnext.sched.schedule import schedule
from vnext.state.digest import digest
from vnext.state.store.clients import services

replace = msgspec.structs.replace

WILD = '''
import random
from vnext.sched.policies import Candidate

def no_hint(candidate): return (1,)
def two(candidate: Candidate, other): return (1,)
def nothing(candidate: Candidate): return None
def nan(candidate: Candidate): return (float("nan"),)
def words(candidate: Candidate): return ("a",)
def raises(candidate: Candidate): return (1 / 0,)
def dice(candidate: Candidate): return (random.random(),)
def with_default(candidate: Candidate, weight=2): return (weight * candidate.id,)
number = 3

def last_come(candidate: Candidate): return (-candidate.id,)
def all_equal(candidate: Candidate): return ()
def least_computed(candidate: Candidate): return (candidate.computed,)
def chaos(candidate: Candidate):
    return ((candidate.id * 7919 + candidate.known * 31 + candidate.computed * 17 + candidate.preemptions) % 13,)
def later_dice(candidate: Candidate): return (0.5,) if candidate.id == 3 else (random.random(),)
def later_raises(candidate: Candidate): return (1 / (candidate.id - 5),)
def later_junk(candidate: Candidate): return (1,) if candidate.id < 5 else [candidate]
'''


@pytest.fixture(scope="module", autouse=True)
def wild(tmp_path_factory: pytest.TempPathFactory):
    folder = tmp_path_factory.mktemp("wild")
    (folder / "wild_policies.py").write_text(WILD)
    (folder / "broken_policies.py").write_text("raise ValueError('half written')")
    sys.path.insert(0, str(folder))
    yield
    sys.path.remove(str(folder))


def test_a_policy_is_found_in_the_working_directory_and_other_modules_are_not(tmp_path, monkeypatch) -> None:
    (tmp_path / "policies_here.py").write_text(f"import beside\n{WILD}")
    (tmp_path / "beside.py").write_text("")
    (tmp_path / "bisect.py").write_text("raise ValueError('not the library')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [folder for folder in sys.path if folder not in ("", str(tmp_path))])
    before = list(sys.path)
    assert policy_of("policies_here:last_come")(SAMPLES[0]) == (-3,)
    assert sys.path == before
    with pytest.raises(PolicyError, match="no function last_come"):
        policy_of("bisect:last_come")


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("fifo", "there is no policy 'fifo': choose fcfs, priority, fair, deadline:MS, or name your own as package.module:function"),
        ("a b:c", "there is no policy"),
        ("no_such_module:f", "cannot be imported (ModuleNotFoundError"),
        ("broken_policies:f", "cannot be imported (ValueError: half written)"),
        ("wild_policies:absent", "the module wild_policies has no function absent"),
        ("wild_policies:number", "has no function number"),
        ("wild_policies:no_hint", "write def no_hint(candidate: Candidate) -> tuple"),
        ("wild_policies:two", "wrong signature"),
        ("os:abort", "wrong signature"),
        ("shutil:rmtree", "wrong signature"),
        ("wild_policies:nothing", "returned None for request 3: it must return a tuple of numbers"),
        ("wild_policies:nan", "none of them NaN"),
        ("wild_policies:words", "returned ('a',)"),
        ("wild_policies:raises", "failed for request 3 with ZeroDivisionError"),
        ("wild_policies:dice", "two different keys"),
    ],
)
def test_what_cannot_work_is_refused_at_the_start(name: str, words: str) -> None:
    with pytest.raises(PolicyError) as refused:
        policy_of(name)
    assert words in str(refused.value) and "\n" not in str(refused.value)


@pytest.mark.parametrize("function", ["fair_share", "crowd_last", "least_computed", "last_come", "all_equal", "scattered"])
def test_a_policy_is_found_by_the_name_that_logs_of_simulated_runs_have(function: str) -> None:
    """A log names its policy by module: one that moves leaves the logs that were written before unreadable."""
    assert policy_of(f"vnext.sim.sample_policies:{function}").__name__ == function


def test_a_parameter_with_a_default_is_no_second_one() -> None:
    assert policy_of("wild_policies:with_default").__name__ == "with_default"


OWN = ["last_come", "all_equal", "least_computed", "chaos"]
DOCUMENTED = ["shortest_job_first", "shortest_job_first_aged"]


@pytest.mark.parametrize("function", OWN)
@pytest.mark.parametrize("seed", range(4))
def test_any_pure_policy_is_lawful_and_ends(function: str, seed: int) -> None:
    """Every law of states and decisions, every stream, under faults: the simulator raises otherwise."""
    drawn = scenario(seed)
    outcome = simulate(replace(drawn, config=replace(drawn.config, policy=f"wild_policies:{function}")))
    assert not outcome.state.requests


@pytest.mark.parametrize("function", DOCUMENTED)
def test_documented_policies_are_lawful(documented_policies: str, function: str) -> None:
    for seed in range(20, 23):
        drawn = scenario(seed)
        outcome = simulate(replace(drawn, config=replace(drawn.config, policy=f"{documented_policies}:{function}")))
        assert not outcome.state.requests


def crowd(policy: str, **changes) -> Engine:
    engine = Engine(
        **(dict(block_size=1, page_count=12, max_num_seqs=8, max_num_batched_tokens=5, policy=policy) | changes)
    )
    for number in range(16):
        engine.arrive([1 + number % 3] * (1 + number % 6), max_tokens=7, priority=number % 3, arrival_ns=number * 10**6)
    return engine


def test_keys_by_the_dice_break_nothing() -> None:
    """Not even a pure function: the engine stays lawful (`Engine` checks after every event) and ends."""
    engine = crowd("wild_policies:later_dice", pipeline_depth=2)
    engine.run_out(steps_max=5_000)
    assert engine.state.counters.finished == 16 and engine.state.counters.preempted and engine.free == 12


@pytest.mark.parametrize("function", ["later_raises", "later_junk"])
def test_a_policy_that_fails_later_stops_the_decision_and_changes_nothing(function: str) -> None:
    engine = crowd(f"wild_policies:{function}")
    before = digest(engine.state)
    with pytest.raises(PolicyError, match=f"wild_policies:{function}.*request 5"):
        schedule(engine.state)
    assert digest(engine.state) == before


def duel(steps: int) -> Engine:
    """Two prompts that each need the whole cache grow side by side, and whoever has computed more gives way."""
    engine = Engine(
        block_size=1,
        page_count=6,
        policy="wild_policies:least_computed",
        long_prefill_token_threshold=1,
        prefix_caching=False,
    )
    engine.arrive([1] * 5, max_tokens=2)
    engine.arrive([2] * 5, max_tokens=2)
    for _ in range(steps):
        engine.step()
    return engine


def test_a_policy_cannot_keep_the_engine_from_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    assert duel(100).state.counters.finished == 2
    monkeypatch.setattr(ranking, "PATIENCE", 10**9)
    endless = duel(400)
    assert endless.state.counters.finished == 0 and endless.state.counters.preempted > 100


@pytest.mark.parametrize("policy", [*BUILT_IN, "deadline:1"])
@pytest.mark.parametrize("depth", [1, 3])
def test_fast_forms_are_equal_to_the_plain_one(policy: str, depth: int) -> None:
    engine = crowd(policy, pipeline_depth=depth)
    preempted = 0
    while engine.state.requests:
        state = engine.state
        key, ids = ranking.keys(state), state.rows.id.tolist()
        places = sorted(range(len(state.waiting)), key=lambda place: key[state.waiting[place].id])
        assert list(ranking.places_best_first(state, 3)) == places[:3]
        assert ranking.rows_best_first(state) == sorted(range(len(ids)), key=lambda row: key[ids[row]])
        plan = schedule(state)
        if plan is not None:
            engine.fold(plan)
            check_decision(state, plan, engine.state)
            preempted += len(plan.preempted)
        if len(engine.state.in_flight) == depth or plan is None:
            engine.commit(*[9] * int(engine.state.in_flight[0].samples.sum()))
    assert preempted


def test_what_a_policy_sees() -> None:
    engine = Engine(max_num_seqs=2)
    for salt in ("a", "b", "a", "a"):
        engine.arrive([1] * 3, max_tokens=5, priority=7, arrival_ns=11, cache_salt=salt)
    engine.step()
    seen = ranking.candidates(engine.state)
    assert seen[0] == Candidate(
        id=0, priority=7, arrival_ns=11, prompt_length=3, max_tokens=5, known=4, computed=3, preemptions=0, running=True,
        tenant_live=3, tenant_running=1, tenant_before=0, now_ns=11,
    )  # fmt: skip
    assert (seen[0].generated, seen[0].remaining) == (1, 4)
    assert [candidate.tenant_before for candidate in seen] == [0, 0, 1, 2]
    assert [candidate.tenant_live for candidate in seen] == [3, 1, 3, 3]
    assert [candidate.tenant_running for candidate in seen] == [1, 1, 1, 1]
    assert [candidate.running for candidate in seen] == [True, True, False, False]
    assert (seen[3].known, seen[3].computed, seen[3].generated) == (3, 0, 0)


def test_verify_decides_again_with_a_policy_it_finds_and_says_so_where_it_cannot(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    log = str(record(tmp_path / "log", "shape", config=small_config(policy="wild_policies:chaos", page_count=18)))
    assert main(["verify", log, "--own-policy"]) == 0 and "decided again" in capsys.readouterr().out
    with monkeypatch.context() as elsewhere:
        elsewhere.delitem(sys.modules, "wild_policies")
        elsewhere.setattr(sys, "path", [folder for folder in sys.path if "wild" not in folder])
        policy_of.cache_clear()
        assert main(["verify", log, "--own-policy"]) == 0
        said = " ".join(capsys.readouterr().out.split())
        assert "not decided again: the policy wild_policies:chaos cannot be imported" in said
        assert "as far as it is without deciding again" in said
    policy_of.cache_clear()


def test_verify_finds_a_policy_that_changed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = str(record(tmp_path / "log", "full", config=small_config(policy="wild_policies:chaos", page_count=18)))
    module = sys.modules["wild_policies"]
    right = module.chaos
    module.chaos = module.last_come
    policy_of.cache_clear()
    assert main(["verify", log, "--own-policy"]) == 1
    assert "decisions of 97 would differ" in " ".join(capsys.readouterr().out.split())
    module.chaos = right
    policy_of.cache_clear()


def test_policies_are_tried_on_requests_that_could_be():
    waits, runs = SAMPLES
    assert not waits.running and waits.computed == 0 and waits.known == waits.prompt_length
    assert runs.running and runs.computed == runs.known - 1 and runs.known > runs.prompt_length


def test_one_clients_queue_delays_no_other() -> None:
    """A request behind the queue of another client is admitted as soon as a row is free, and by priority before that."""
    engine = Engine(policy="fair", max_num_seqs=2)
    crowd = [engine.arrive([1] * 3, max_tokens=3, client=7) for _ in range(60)]
    engine.step()
    alone = engine.arrive([1] * 3, max_tokens=3, client=8)
    urgent = engine.arrive([1] * 3, max_tokens=3, client=7, priority=-1)
    admitted: list[int] = []
    while engine.state.requests:
        admitted += [id_ for id_ in engine.step() if id_ not in admitted]
    assert admitted[:4] == [crowd[0], crowd[1], urgent, alone]
    assert [id_ for id_ in admitted if id_ in crowd] == crowd


def test_no_crowd_of_new_clients_starves_one_that_waits() -> None:
    """Each newcomer begins 16 tokens behind the one before it."""
    engine = Engine(policy="fair", max_num_seqs=1)
    crowd = [engine.arrive([1] * 2, max_tokens=1, client=1) for _ in range(5)]
    finished: list[int] = []
    for number in range(90):
        engine.arrive([1] * 2, max_tokens=1, client=2 + number)
        finished += engine.step()
    places = [finished.index(id_) for id_ in crowd]
    assert places == sorted(places) and places[-1] <= 15


def test_turns_are_of_tokens_and_not_of_requests() -> None:
    """Two clients that always wait: the one with long requests gets as many tokens as the one with short ones."""
    engine = Engine(policy="fair", max_num_seqs=1, prefix_caching=False)
    for _ in range(12):
        engine.arrive([1] * 16, max_tokens=4, client=1)
    for _ in range(60):
        engine.arrive([2] * 3, max_tokens=2, client=2)
    while min(len(each.queue) for each in engine.state.clients.live.mapping().values()) > 0:
        served = services(engine.state, engine.state.clients)
        assert max(served.values()) - min(served.values()) <= 19, served
        engine.step()


def test_the_earliest_deadline_goes_first_and_late_ones_behind_those_in_time() -> None:
    """A `priority` is the milliseconds until the first token; 0 takes those of the policy's name."""
    engine = Engine(policy="deadline:100")
    arrived_ms = {"usual": (0, 0), "late": (0, 9), "patient": (1, 500), "overdue": (0, 2), "soon": (20, 15)}
    names = [name for name, (at, ms) in arrived_ms.items() if [engine.arrive([1] * 3, priority=ms, arrival_ns=at * 10**6)]]
    order = [names[place] for place in ranking.places_best_first(engine.state, 9)]
    assert order == ["overdue", "soon", "usual", "patient", "late"]


@pytest.mark.parametrize(("overdue", "ends"), [(deadline.OVERDUE, True), (10**6, False)])
def test_a_late_request_does_not_starve(monkeypatch: pytest.MonkeyPatch, overdue: int, ends: bool) -> None:
    """In an engine that always has requests in time, a late one is served when it has waited OVERDUE times what it allowed."""
    for module in (deadline, ranking):
        monkeypatch.setattr(module, "OVERDUE", overdue)
    engine = Engine(policy="deadline:10", max_num_seqs=1, prefix_caching=False)
    late, finished = engine.arrive([1] * 3, max_tokens=1, priority=1), list[int]()
    for number in range(60):
        for _ in range(2):
            engine.arrive([2] * 3, max_tokens=1, arrival_ns=number * 10**6 + 2 * 10**6)
        finished += engine.step()
    assert (late in finished) == ends and (not ends or finished.index(late) == deadline.OVERDUE - 2)


def test_a_request_that_has_its_first_token_is_never_late() -> None:
    """The one that gives way is the late prompt and not the answer that is under way, whose deadline was as early."""
    begun = deadline.deadline_key(SAMPLES[1], 3, True, SAMPLES[1].arrival_ns + 2 * 10**9, 1000)
    late = deadline.deadline_key(SAMPLES[0], 4, False, SAMPLES[0].arrival_ns + 2 * 10**9, 1000)
    in_time = deadline.deadline_key(SAMPLES[0], 5, False, SAMPLES[0].arrival_ns, 1000)
    assert begun == in_time < late


@pytest.mark.parametrize("name", ["deadline:0", "deadline:-1", "deadline:1.5", "deadline:", "deadline: 5"])
def test_a_deadline_is_whole_milliseconds(name: str) -> None:
    with pytest.raises(PolicyError, match="there is no policy"):
        policy_of(name)


def test_time_without_requests_earns_nothing() -> None:
    """A client that comes after another was served for long does not get everything until it has had as much."""
    engine = Engine(policy="fair", max_num_seqs=1)
    early = [engine.arrive([1] * 8, max_tokens=3, client=1) for _ in range(20)]
    finished: list[int] = []
    while len(finished) < 10:
        finished += engine.step()
    late = [engine.arrive([2] * 8, max_tokens=3, client=2) for _ in range(10)]
    while engine.state.requests:
        finished += engine.step()
    order = [id_ in late for id_ in dict.fromkeys(finished)][10:]
    assert len(early) == 20 and 3 <= sum(order[:8]) <= 5, order


def test_what_a_client_is_ahead_stays_while_others_wait() -> None:
    """A client that asks for one long answer at a time is served no more than one that waits all the time."""
    engine = Engine(policy="fair", max_num_seqs=1, prefix_caching=False)
    for _ in range(40):
        engine.arrive([1] * 4, max_tokens=2, client=1)
    engine.step()
    got = 0
    for _ in range(30):
        if not any(request.client == 2 for request in engine.state.requests.mapping().values()):
            engine.arrive([2] * 16, max_tokens=4, client=2)
            got += 1
        engine.step()
    assert 1 < got <= 5


def test_the_one_that_is_preempted_is_of_the_client_with_the_most_service() -> None:
    engine = Engine(policy="fair", max_num_seqs=4, page_count=9, block_size=4, prefix_caching=False)
    innocent = engine.arrive([1] * 4, max_tokens=12, client=1)
    crowd = [engine.arrive([2] * 8, max_tokens=12, client=2) for _ in range(3)]
    late = []
    while not engine.state.counters.preempted:
        engine.step()
    late = [entry.id for entry in engine.state.waiting]
    assert innocent not in late and set(late) <= set(crowd)


@pytest.mark.parametrize("seed", range(40, 52))
def test_one_client_is_served_first_come_first_served(seed: int) -> None:
    """With one client and one priority, `fair` decides what `fcfs` decides, plan by plan."""
    drawn = scenario(seed, client_count=20)
    clients = tuple(replace(client, priority=0, cache_salt="") for client in drawn.clients)
    faults = replace(drawn.faults, whim=0, illegal=0)
    runs = []
    for policy in ("fcfs", "fair"):
        config = replace(drawn.config, policy=policy)
        runs.append(simulate(replace(drawn, config=config, clients=clients, faults=faults)).events[1:])
    assert runs[0] == runs[1]
