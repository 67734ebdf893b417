"""Decides a list of events again: every decision and every sample is made anew.

Owns what `shrink` and `to-test` share: the events of a whole log, what its model answered, users' predicates, and the
check of an event list. A re-decided list is legal whatever the engine decides today, up to the engine's own failure.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path

from msgspec.structs import replace

from vnext.log.codec import Frame
from vnext.replay.futures.loads import resident
from vnext.replay.futures.revived import revived, salted
from vnext.replay.reading.folding import first_state
from vnext.replay.reading.source import Log, UnusableLog
from vnext.replay.reading.verify import why_not_decided
from vnext.sim.findings import Finding, check_events, toy_voice
from vnext.sim.shrink import RUN_OUT, Author, Failure, Voice, Whim, moves_from, moves_of
from vnext.sim.toy import next_token
from vnext.state.config import SchedulerConfig
from vnext.state.events import AnyEvent, EngineStarted, RequestArrived, RequestResumed, plan_of, unpack_tokens
from vnext.state.outputs import Output, outputs
from vnext.state.reduce import fold, reduce, start
from vnext.state.state import State

NOWHERE = -1
"""The place of an event that the log does not have."""
Predicate = Callable[[State, AnyEvent, State], bool]
"""Whether something is wrong with an event: the state before it, the event, the state after it."""


def events_of(log: Log, own_policy: bool = False) -> tuple[AnyEvent, ...]:
    """All events of a log up to its end or first gap, the engine's start first.

    Requests are named by their numbers, so that answers can be looked up by name. If the log has lost its beginning,
    the requests alive at its start arrive anew in a fresh engine (`redecided_ring`). Raises UnusableLog for a log whose
    steps cannot be decided here; `own_policy` as in `verify`.
    """
    require_decisions(log, own_policy)
    started, events = log.header.started, tuple(recorded_events(log))
    return redecided_ring(first_state(log), started, events) if log.header.index else (started, *events)


def recorded_events(log: Log) -> Iterator[AnyEvent]:
    """The events of a log's frames up to its end or first gap, each request named by its number."""
    sequence = log.header.first_event if log.header.index else 1
    for item in log.items():
        if isinstance(item, Frame):
            if item.first_event != sequence:
                return
            sequence += len(item.events)
            for event in item.events:
                yield replace(event, name=str(event.id)) if isinstance(event, RequestArrived) else event


def redecided_ring(first: State, started: EngineStarted, events: Sequence[AnyEvent]) -> tuple[AnyEvent, ...]:
    """Events after a snapshot's state as a whole list. Requests alive there arrive anew with their tokens so far
    (revived.py) and are computed again. Then everything happens in its recorded order, with plans decided anew and
    recorded samples.
    """
    lives = revived(first)
    answers = {str(life.arrival.id): unpack_tokens(life.last).tolist() for life in lives}
    for news in _news(first, events):
        answers.setdefault(str(news.id), []).append(news.token)
    answers |= {name: [*brought, *answers.get(name, ())] for name, brought in _brought(events).items()}
    arrivals = [replace(life.arrival, name=str(life.arrival.id)) for life in lives]
    author = Author(started, recorded_voice(started.config, answers, own_ends([*arrivals, *events])))
    for load in resident(first, started.config.max_loras):
        author.follow(NOWHERE, load)
    for arrival in (arrival for arrival, life in zip(arrivals, lives) if life.last):
        author.follow(NOWHERE, arrival)
    _catch_up(author)
    for arrival in (arrival for arrival, life in zip(arrivals, lives) if not life.last):
        author.follow(NOWHERE, arrival)
    for place, move in enumerate(moves_from(first, events)):
        if not author.follow(place, salted(move, started.config) if isinstance(move, RequestArrived) else move):
            break
    return tuple(author.events)


def _catch_up(author: Author) -> None:
    """Run steps until every request that arrived has a reported token; at most twice as many as the prompts take,
    because some requests may find no room."""
    state = author.state
    prompts = sum(len(entry.tokens) // 4 for entry in state.waiting)
    for _ in range(2 * -(-prompts // state.config.max_num_batched_tokens)):
        rows = author.state.rows
        if not author.state.waiting and bool((rows.known > rows.prompt).all()):
            return
        for move in RUN_OUT[:2]:
            author.follow(NOWHERE, move)


def require_decisions(log: Log, own_policy: bool = False) -> None:
    """Raises UnusableLog unless the steps of the log can be decided here, from any state. `own_policy` as in `verify`."""
    if why_not := why_not_decided(log, own_policy):
        raise UnusableLog(f"the steps of this log cannot be decided here: {why_not}")


def folded(state: State, events: Sequence[AnyEvent]) -> Iterator[tuple[State, AnyEvent, State]]:
    """(before, event, after) of every event after a state, up to one that fails."""
    for event in events:
        try:
            after = reduce(state, event)
        except Exception:  # any failure ends the list; the caller determines which
            return
        yield state, event, after
        state = after


def started_of(events: Sequence[AnyEvent]) -> EngineStarted:
    """The event with which a whole list begins."""
    started = events[0]
    assert isinstance(started, EngineStarted)
    return started


def answers_of(events: Sequence[AnyEvent]) -> dict[str, list[int]]:
    """The reported tokens of each request, by its name; those that it brought from another engine first."""
    answers = _brought(events)
    for news in _news(start(started_of(events)), events[1:]):
        answers.setdefault(news.name, []).append(news.token)
    return answers


def _brought(events: Sequence[AnyEvent]) -> dict[str, list[int]]:
    resumed = (event for event in events if isinstance(event, RequestResumed))
    return {event.name: unpack_tokens(event.generated).tolist() for event in resumed if event.generated}


def _news(state: State, events: Sequence[AnyEvent]) -> Iterator[Output]:
    """The outputs of events after a state, up to an event that fails."""
    try:
        for event in events:
            after, effects = fold(state, event)
            yield from outputs(state, event, after, effects) if effects is not None else ()
            state = after
    except Exception:  # outputs after a failure are unknown; those before it are valid
        return


def strange_places(events: Sequence[AnyEvent]) -> tuple[int, ...]:
    """Numbers of the plans that the scheduler would not make."""
    return tuple(place for place, move in enumerate(moves_of(events), start=1) if isinstance(move, Whim))


def recorded_voice(config: SchedulerConfig, answers: Mapping[str, Sequence[int]], ends: Collection[int] = ()) -> Voice:
    """What a log recorded, as the voice of `shrink`; after that always the smallest token that ends nothing."""
    filler = next(token for token in range(1, 2**31) if token not in ends and token not in config.eos_token_ids)

    def voice(arrival: RequestArrived, history: Sequence[int]) -> int:
        reported, place = answers.get(arrival.name, ()), len(history) - len(arrival.prompt) // 4
        return reported[place] if place < len(reported) else filler

    return voice


def own_ends(events: Sequence[AnyEvent]) -> set[int]:
    """Tokens that end some request through its own settings."""
    return {token for event in events if isinstance(event, RequestArrived) for token in event.sampling.stop_token_ids}


def voice_of(events: Sequence[AnyEvent], toy: bool) -> Voice:
    """The model of a log: the simulator's toy, or what was recorded."""
    config = started_of(events).config
    return toy_voice(config) if toy else recorded_voice(config, answers_of(events), own_ends(events))


def redecided(events: Sequence[AnyEvent], voice: Voice, strange: Collection[int] = ()) -> list[AnyEvent]:
    """The list as this engine runs it: plans decided anew except at the places `strange`, samples drawn anew."""
    author = Author(started_of(events), voice)
    for place, event in enumerate(events[1:], start=1):
        if not author.follow(place, Whim(plan) if (plan := plan_of(event)) is not None and place in strange else event):
            break
    return author.events


def finding(
    events: Sequence[AnyEvent],
    answers: Mapping[str, Sequence[int]] | None = None,
    strange: Collection[int] = (),
    predicate: Predicate | None = None,
) -> Finding | None:
    """What is wrong with an event list when it is decided again, None if nothing is.

    `answers` are recorded ones by name; with None the simulator's toy model answers, and is compared too. A `predicate`
    replaces the laws.
    """
    config = started_of(events).config
    voice = toy_voice(config) if answers is None else recorded_voice(config, answers, own_ends(events))
    story = redecided(events, voice, strange)
    if predicate is None:
        return check_events(story, toy=answers is None)
    length = failing(predicate)(story)
    return None if length is None else Finding("predicate", f"the predicate holds after event {length - 1}", length)


def checked_events(events: Sequence[AnyEvent]) -> tuple[Finding | None, bool]:
    """The first failure of recorded events, and whether only the toy model's answers reveal it."""
    found = check_events(events, toy=False)
    if found is not None or not is_toy(events):
        return found, False
    found = check_events(events, toy=True)
    return found, found is not None


def is_toy(events: Sequence[AnyEvent]) -> bool:
    """Whether the simulator's model produced the answers, and can produce them again: most first tokens are its own."""
    started = started_of(events)
    if started.model != "toy" or not started.config.vocab_size:
        return False
    answers, right, reported = answers_of(events), 0, 0
    for event in events:
        if isinstance(event, RequestArrived) and event.name in answers:
            prompt = unpack_tokens(event.prompt).tolist()
            right += answers[event.name][0] == next_token(prompt, event.sampling.seed, started.config.vocab_size)
            reported += 1
    return 2 * right >= reported


# ---- predicates of one's own -------------------------------------------------------------------------------------


def failing(predicate: Predicate) -> Failure:
    """The failure that `shrink` looks for: an event for which the predicate is true."""

    def failure(events: Sequence[AnyEvent]) -> int | None:
        place = held_at(predicate, start(started_of(events)), events[1:])
        return None if place is None else place + 2

    return failure


def held_at(predicate: Predicate, state: State, events: Sequence[AnyEvent]) -> int | None:
    """The place of the first event after a state for which the predicate is true, None if there is none."""
    for place, (before, event, after) in enumerate(folded(state, events)):
        try:
            if predicate(before, event, after):
                return place
        except Exception as error:  # foreign code: any error becomes one sentence
            what = f"{type(error).__name__}: {error}"
            raise UnusableLog(
                f"the predicate fails at event {before.sequence} with {what}: it must return a truth"
            ) from error
    return None


def predicate_of(name: str) -> Predicate:
    """The function FILE:FUNC. Raises UnusableLog if there is none."""
    path, _, function = name.rpartition(":")
    if not path or not Path(path).is_file():
        raise UnusableLog(f"there is no predicate {name}: give FILE:FUNC, a Python file and a function in it")
    spec = importlib.util.spec_from_file_location(Path(path).stem, path)
    try:
        if spec is None or spec.loader is None:
            raise ImportError("its name does not end in .py")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    except Exception as error:  # foreign code runs when its file is imported
        raise UnusableLog(f"the predicate's file {path} cannot be imported ({type(error).__name__}: {error})") from error
    found: Predicate | None = getattr(module, function, None)
    if not callable(found):
        raise UnusableLog(f"{path} has no function {function}: write def {function}(before, event, after) -> bool")
    return found
