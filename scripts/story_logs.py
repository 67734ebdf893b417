"""Record the logs of the guide's stories (docs/replay-guide.md): `python scripts/story_logs.py DIR`.

Runs the real scheduler, reducer and recorder on a simulated clock: a cost model gives the duration of a step, within one
per cent, and a hash replaces the model's tokens. So each log is the same on every machine and in every run. STORIES holds the
actions of clients and ranks. `shop_policies.py`, which one story needs, is written beside the logs.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import msgspec
import xxhash

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from vnext.log.codec import RankDetail, RankDigest  # noqa: E402
from vnext.runtime.record.recorder import Recorder  # noqa: E402
from vnext.runtime.record.segments import Bounds  # noqa: E402
from vnext.sched.policies import PolicyError  # noqa: E402
from vnext.sched.schedule import schedule  # noqa: E402
from vnext.state.config import SchedulerConfig  # noqa: E402
from vnext.state.digest import details, digest, histories, requests_otherwise  # noqa: E402
from vnext.state.events import (  # noqa: E402
    AnyEvent,
    EngineStarted,
    RequestArrived,
    StepCommitted,
    pack_tokens,
    unpack_tokens,
)
from vnext.state.fold_commit import match_samples  # noqa: E402
from vnext.state.params import Sampling  # noqa: E402
from vnext.state.reduce import reduce, start  # noqa: E402
from vnext.state.state import State, StepInFlight  # noqa: E402

STARTED_NS = 1_790_000_000 * 10**9
"""The wall clock at each engine's start; the monotonic clock begins at a second."""
MONOTONIC_NS = 10**9
VOCABULARY = 32_000
STEP_US, TOKEN_US, REQUEST_US, READ_US = 6_000.0, 45.0, 120.0, 0.15
"""The cost of a step: fixed, per token, per request, and per position that attention reads."""
JITTER = 0.01
POLICY = '''"""Our shop's policies."""

from vnext.sched.policies import Candidate


def nearly_done_first(candidate: Candidate) -> tuple[int | float, ...]:
    """Whoever has the greater part of its answer behind it goes first: it frees its blocks soonest."""
    return (candidate.remaining / candidate.generated if candidate.running else candidate.id,)
'''


class Coming(msgspec.Struct, frozen=True, kw_only=True):
    """A request: its arrival time, its prompt and the length of its answer."""

    at_us: int
    prompt: list[int]
    answer: int
    salt: str = ""
    client: int = 0
    priority: int = 0
    adapter: str = ""
    weight: int = 1


class Story(msgspec.Struct, frozen=True, kw_only=True):
    """The course of one engine. `wrong`: (rank, step) of a token that this rank alone samples differently."""

    config: SchedulerConfig
    clients: list[Coming]
    ranks: int = 1
    wrong: tuple[int, int] | None = None


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("stories", nargs="*", help=f"which of {', '.join(STORIES)} (default: all)")
    options = parser.parse_args(argv)
    for name in options.stories or STORIES:
        record(options.folder, name)
        print(f"recorded: {options.folder / name}")
    return 0


def record(folder: Path, name: str) -> Path:
    """Write the log of one story into its own folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "shop_policies.py").write_text(POLICY)
    sys.path.insert(0, str(folder.resolve()))
    try:
        Run(folder / name, STORIES[name]()).run()
    finally:
        sys.path.remove(str(folder.resolve()))
    return folder / name


class Clock:
    """The simulated time of a run."""

    def __init__(self) -> None:
        self.us = 0

    def monotonic_ns(self) -> int:
        return MONOTONIC_NS + 1000 * self.us

    def time_ns(self) -> int:
        return STARTED_NS + 1000 * self.us


class Run:
    """One engine and its ranks. Mutable."""

    def __init__(self, log_dir: Path, story: Story) -> None:
        self.story, self.clock = story, Clock()
        self.started = EngineStarted(
            config=story.config, model="example-8b", model_digest="", world_size=story.ranks, environment={},
            started_ns=STARTED_NS,
        )  # fmt: skip
        self.state: State = start(self.started)
        self.other: State | None = start(self.started) if story.wrong is not None else None
        self._log_dir = log_dir
        self._busy_us: deque[tuple[int, int]] = deque()
        self._device_us = 0
        self._frame: list[tuple[AnyEvent, State]] = []
        self._reports: dict[int, list[RankDigest]] = {}
        self._details: dict[int, list[RankDetail]] = {}
        self._drifted = False

    def run(self) -> None:
        """Run until every request is answered, the policy fails or a rank drifts."""
        with mock.patch.multiple(time, monotonic_ns=self.clock.monotonic_ns, time_ns=self.clock.time_ns):
            self.recorder = Recorder.open(self._log_dir, self.started, "full", Bounds(timestamped=True))
            try:
                self._turns(deque(sorted(self.story.clients, key=lambda coming: coming.at_us)))
            except PolicyError as error:
                print(f"the engine has ended: {error}")
            if self._frame:
                self._write()  # as the engine core does: a folded event belongs in the log
            self.recorder.close()

    def _turns(self, clients: deque[Coming]) -> None:
        while (clients or self._busy_us) and not self._drifted:
            ends_us = [self._busy_us[0][0]] if self._busy_us else []
            self.clock.us = min([*ends_us, *(coming.at_us for coming in list(clients)[:1])])
            while clients and clients[0].at_us <= self.clock.us:
                self._fold(self._arrival(clients.popleft()))
            if ends_us and ends_us[0] <= self.clock.us:
                self._commit()
            self._plan()

    def _arrival(self, coming: Coming) -> RequestArrived:
        sampling = Sampling(seed=self.state.next_id, max_tokens=coming.answer, ignore_eos=True, adapter=coming.adapter)
        return RequestArrived(
            id=self.state.next_id, name=f"cmpl-{self.state.next_id}", prompt=pack_tokens(coming.prompt), sampling=sampling,
            priority=coming.priority, arrival_ns=STARTED_NS + 1000 * coming.at_us, cache_salt=coming.salt,
            client=coming.client, weight=coming.weight,
        )  # fmt: skip

    def _plan(self) -> None:
        while not self._drifted:
            plan = schedule(self.state)
            if plan is not None:
                self._fold(plan)
                scheduled = self.state.in_flight[-1]
                took_us = self._took_us(scheduled)
                self._device_us = max(self.clock.us, self._device_us) + took_us
                self._busy_us.append((self._device_us, took_us))
                self._report(plan.step)
            if self._frame:
                self._write()
            if plan is None:
                return

    def _took_us(self, scheduled: StepInFlight) -> int:
        return round(step_us(scheduled))

    def _commit(self) -> None:
        _, took_us = self._busy_us.popleft()
        scheduled = self.state.in_flight[0]
        self.recorder.took(scheduled.step, took_us / 1e6)
        ends = (scheduled.starts + scheduled.counts)[scheduled.samples].tolist()
        tokens = [sampled(id_, end) for id_, end in zip(scheduled.ids[scheduled.samples].tolist(), ends)]
        self._fold(StepCommitted(step=scheduled.step, tokens=pack_tokens(tokens)))
        self._drifted = scheduled.step in self._details

    # ---- ranks ---------------------------------------------------------------------------------------------------

    def _report(self, step: int) -> None:
        """Report each rank's digest of the state before a step, together with the step's result."""
        if step % self.state.config.digest_interval:
            return
        ours = digest(self.state)
        reports = [RankDigest(rank, step, ours) for rank in range(self.story.ranks)]
        if self.other is not None:
            rank, theirs = self.story.wrong[0], digest(self.other)
            reports[rank] = RankDigest(rank, step, theirs)
            if (theirs, self.other.token_digest) != (ours, self.state.token_digest):
                requests = requests_otherwise(self.state, histories(self.other)) if theirs == ours else ()
                self._details[step] = [RankDetail(rank, step, details(self.other), self.other.token_digest, requests)]
        self._reports[step] = reports

    def _fold(self, event: AnyEvent) -> None:
        self._frame.append((event, self.state))
        self.state = reduce(self.state, event)
        if self.other is not None:
            self.other = reduce(self.other, self._as_it_came_out(event))

    def _as_it_came_out(self, event: AnyEvent) -> AnyEvent:
        """Return the event with the tokens that the wrong rank sampled itself."""
        if not isinstance(event, StepCommitted) or event.step != self.story.wrong[1]:
            return event
        tokens = unpack_tokens(event.tokens).tolist()
        return msgspec.structs.replace(event, tokens=pack_tokens([tokens[0] ^ 1, *tokens[1:]]))

    def _write(self) -> None:
        events, befores = zip(*self._frame) if self._frame else ((), ())
        matched = [
            match_samples(before, event) if isinstance(event, StepCommitted) else None for event, before in self._frame
        ]
        self._frame = []
        due = [step for step in self._reports if step < self.state.committed]
        reports = [report for step in due for report in self._reports.pop(step)]
        reported = [detail for step in due for detail in self._details.get(step, ())]
        self.recorder.append(events, befores, digest(self.state), reports, matched, reported)


def step_us(scheduled: StepInFlight) -> float:
    """Return the duration of a step in microseconds."""
    read = int((scheduled.starts + scheduled.counts).sum())
    cost = STEP_US + TOKEN_US * scheduled.tokens + REQUEST_US * len(scheduled.ids) + READ_US * read
    return cost * (1 + JITTER * (2 * fraction("step", scheduled.step) - 1))


def fraction(*key: object) -> float:
    """Return a number in [0, 1) that depends on the key alone."""
    return xxhash.xxh3_64_intdigest(repr(key).encode()) / 2**64


def sampled(id_: int, place: int) -> int:
    return 2 + int(fraction("token", id_, place) * (VOCABULARY - 2))


# ---- the stories -------------------------------------------------------------------------------------------------


CLIENTS = (0x2C41A7E5D0936B18, 0x51F0C2889E47D3A6, 0x7B96E3145AD8F02C)


def text(name: object, length: int) -> list[int]:
    """Return a text as tokens; equal names give equal texts."""
    rng = random.Random(str(name))
    return [rng.randrange(2, VOCABULARY) for _ in range(length)]


def config(**changes: object) -> SchedulerConfig:
    fields = dict(
        block_size=16,
        page_count=4096,
        max_num_batched_tokens=2048,
        max_num_seqs=64,
        max_model_len=16_384,
        vocab_size=VOCABULARY,
        eos_token_ids=(1,),
    )
    return SchedulerConfig(**(fields | changes))


def talks(count: int, every_us: int, begin_us: int = 0, answer: int = 60) -> Iterator[Coming]:
    """Short questions at a steady rate, a little uneven."""
    for number in range(count):
        at_us = begin_us + int((number + 0.5 * fraction("talk", number)) * every_us)
        length = 40 + int(160 * fraction("length", number))
        yield Coming(at_us=at_us, prompt=text(f"talk {number}", length), answer=answer + number % 21)


def spike(threshold: int = 0) -> Story:
    """Steady short questions; after two seconds three documents of 12,000 tokens arrive at once."""
    documents = [Coming(at_us=2_000_000 + 1000 * each, prompt=text(f"document {each}", 12_000), answer=80) for each in range(3)]
    return Story(config=config(long_prefill_token_threshold=threshold), clients=[*talks(60, 80_000), *documents])


def drift(wrong: tuple[int, int] | None = (2, 137), interval: int = 64) -> Story:
    """Four ranks, one of which samples a different token once."""
    return Story(config=config(digest_interval=interval), clients=list(talks(30, 60_000)), ranks=4, wrong=wrong)


def cache(timestamped: bool) -> Story:
    """A support bot: an instruction of 600 tokens precedes each question. `timestamped`: the time of day precedes both."""
    clients = []
    for number in range(50):
        at_us = int((number + fraction("bot", number)) * 60_000)
        date, time_of_day = text("Today is", 4), text(f"minute {number}", 3)
        instruction = text("instruction", 600)
        question = text(f"question {number}", 30 + number % 50)
        head = [*date, *time_of_day, *instruction] if timestamped else [*instruction, *date, *time_of_day]
        clients.append(Coming(at_us=at_us, prompt=[*head, *question], answer=40))
    return Story(config=config(page_count=2048), clients=clients)


def noisy(policy: str = "fcfs") -> Story:
    """Two clients ask short questions at a steady rate; after two seconds a third one sends sixty long ones at once."""
    asked = [msgspec.structs.replace(each, client=CLIENTS[place % 2]) for place, each in enumerate(talks(80, 60_000))]
    flood = [
        Coming(at_us=2_000_000 + 1000 * each, prompt=text(f"page {each}", 900), answer=150, client=CLIENTS[2]) for each in range(60)
    ]
    return Story(config=config(policy=policy, max_num_seqs=16), clients=[*asked, *flood])


def crash() -> Story:
    """A custom policy of the shop that divides by the number of tokens a request has generated."""
    return Story(
        config=config(policy="shop_policies:nearly_done_first", page_count=160), clients=list(talks(60, 20_000, answer=120))
    )


STORIES = {
    "spike": spike,
    "spike-after": lambda: spike(128),
    "drift": drift,
    "drift-again": lambda: drift(interval=1),
    "drift-after": lambda: drift(wrong=None, interval=1),
    "cache": lambda: cache(True),
    "cache-before": lambda: cache(False),
    "noisy": noisy,
    "noisy-after": lambda: noisy("fair"),
    "crash": crash,
}

if __name__ == "__main__":
    sys.exit(main())
