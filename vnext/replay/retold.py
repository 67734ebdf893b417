"""Retelling: a list of events as a story that is told again, every decision and every sample asked for anew.

Owns what `shrink` and `to-test` share: the events of a whole log, what its model answered, predicates of one's own, and the
judgement of a story. A retold story is legal whatever the engine decides today, up to the engine's own failure.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path

from msgspec.structs import replace

from vnext.replay.source import Log, UnusableLog
from vnext.replay.verify import why_not_decided
from vnext.sched.sim.judge import Finding, judge, toy_voice
from vnext.sched.sim.shrink import Author, Failure, Voice, Whim, moves_of
from vnext.sched.sim.toy import next_token
from vnext.state.committing import settle
from vnext.state.config import SchedulerConfig
from vnext.state.events import AnyEvent, RequestArrived, StepCommitted, StepPlanned, unpack_tokens
from vnext.state.log import Frame
from vnext.state.outputs import outputs
from vnext.state.reduce import reduce, start
from vnext.state.state import State

Predicate = Callable[[State, AnyEvent, State], bool]
"""Whether something is wrong about an event: the state before it, the event, the state after it."""


def events_of(log: Log, own_policy: bool = False) -> tuple[AnyEvent, ...]:
    """All events of a log that begins with the engine's start, up to its end or first gap. UnusableLog otherwise.

    Requests are named by their numbers, so that what each was answered can be told by its name. `own_policy` as in `verify`.
    """
    require_story(log, own_policy)
    events: list[AnyEvent] = [log.header.started]
    for item in log.items():
        if isinstance(item, Frame):
            if item.first_event != len(events):
                break
            events += item.events
    return tuple(replace(event, name=str(event.id)) if isinstance(event, RequestArrived) else event for event in events)


def require_story(log: Log, own_policy: bool = False) -> None:
    """UnusableLog unless the log begins with the engine's start and its steps can be decided here. `own_policy` as in `verify`."""
    header = log.header
    if header.index:
        raise UnusableLog(
            f"{log.paths[0]} begins at event {header.first_event}: a story needs the engine's start, segment 0 of the log"
        )
    if why_not := why_not_decided(log, own_policy):
        raise UnusableLog(f"the steps of this log cannot be decided here: {why_not}")


def folded(events: Sequence[AnyEvent]) -> Iterator[tuple[State, AnyEvent, State]]:
    """(before, event, after) of every event after the first, up to one that fails."""
    state = start(events[0])
    for event in events[1:]:
        try:
            after = reduce(state, event)
        except Exception:  # any failure of any kind ends a story; who judges it says which
            return
        yield state, event, after
        state = after


def answers_of(events: Sequence[AnyEvent]) -> dict[str, list[int]]:
    """The tokens that each request was told, by its name."""
    answers: dict[str, list[int]] = {}
    state = start(events[0])
    try:
        for event in events[1:]:
            settled = settle(state, event) if isinstance(event, StepCommitted) else None
            after = reduce(state, event, settled)
            for news in outputs(state, event, after, settled) if settled is not None else ():
                answers.setdefault(news.name, []).append(news.token)
            state = after
    except Exception:  # what a broken engine says next cannot be told; what came before can
        return answers
    return answers


def strange_places(events: Sequence[AnyEvent]) -> tuple[int, ...]:
    """Numbers of the plans that the scheduler would not make."""
    return tuple(place for place, move in enumerate(moves_of(events), start=1) if isinstance(move, Whim))


def recorded_voice(config: SchedulerConfig, answers: Mapping[str, Sequence[int]], ends: Collection[int] = ()) -> Voice:
    """What a log recorded, as the voice of `shrink`; beyond that always the smallest token that ends nothing."""
    filler = next(token for token in range(1, 2**31) if token not in ends and token not in config.eos_token_ids)

    def voice(arrival: RequestArrived, history: Sequence[int]) -> int:
        told, place = answers.get(arrival.name, ()), len(history) - len(arrival.prompt) // 4
        return told[place] if place < len(told) else filler

    return voice


def own_ends(events: Sequence[AnyEvent]) -> set[int]:
    """Tokens that end some request by its own wish."""
    return {token for event in events if isinstance(event, RequestArrived) for token in event.sampling.stop_token_ids}


def voice_of(events: Sequence[AnyEvent], toy: bool) -> Voice:
    """The model of a log: the simulator's toy, or what was recorded."""
    config = events[0].config
    return toy_voice(config.vocab_size) if toy else recorded_voice(config, answers_of(events), own_ends(events))


def retold(events: Sequence[AnyEvent], voice: Voice, strange: Collection[int] = ()) -> list[AnyEvent]:
    """The story as this engine tells it: plans decided anew but those at the places `strange`, samples asked for again."""
    author = Author(events[0], voice)
    for place, event in enumerate(events[1:], start=1):
        if not author.follow(place, Whim(event) if isinstance(event, StepPlanned) and place in strange else event):
            break
    return author.events


def finding(
    events: Sequence[AnyEvent],
    answers: Mapping[str, Sequence[int]] | None = None,
    strange: Collection[int] = (),
    predicate: Predicate | None = None,
) -> Finding | None:
    """What is wrong with a story when it is told again, None if nothing is.

    `answers` are recorded ones by name; None: the simulator's toy model answers, and is compared too. `predicate`: ask
    that instead of the laws.
    """
    config = events[0].config
    voice = toy_voice(config.vocab_size) if answers is None else recorded_voice(config, answers, own_ends(events))
    story = retold(events, voice, strange)
    if predicate is None:
        return judge(story, toy=answers is None)
    length = failing(predicate)(story)
    return None if length is None else Finding("predicate", f"the predicate holds after event {length - 1}", length)


def judged(events: Sequence[AnyEvent]) -> tuple[Finding | None, bool]:
    """The first failure of recorded events, and whether the toy model's answers had to be asked to see it."""
    found = judge(events, toy=False)
    if found is not None or not is_toy(events):
        return found, False
    found = judge(events, toy=True)
    return found, found is not None


def is_toy(events: Sequence[AnyEvent]) -> bool:
    """Whether the simulator's model has answered this, and can be asked again: most first tokens are its own."""
    started = events[0]
    if started.model != "toy" or not started.config.vocab_size:
        return False
    answers, right, told = answers_of(events), 0, 0
    for event in events:
        if isinstance(event, RequestArrived) and event.name in answers:
            prompt = unpack_tokens(event.prompt).tolist()
            right += answers[event.name][0] == next_token(prompt, event.sampling.seed, started.config.vocab_size)
            told += 1
    return 2 * right >= told


# ---- predicates of one's own -------------------------------------------------------------------------------------


def failing(predicate: Predicate) -> Failure:
    """The failure that `shrink` looks for: an event of which the predicate is true."""

    def failure(events: Sequence[AnyEvent]) -> int | None:
        for length, (before, event, after) in enumerate(folded(events), start=2):
            try:
                if predicate(before, event, after):
                    return length
            except Exception as error:  # foreign code: whatever it raises becomes one sentence
                what = f"{type(error).__name__}: {error}"
                raise UnusableLog(f"the predicate fails at event {length - 1} with {what}: it must return a truth") from error
        return None

    return failure


def predicate_of(name: str) -> Predicate:
    """The function FILE:FUNC. UnusableLog if there is none."""
    path, _, function = name.rpartition(":")
    if not path or not Path(path).is_file():
        raise UnusableLog(f"there is no predicate {name}: give FILE:FUNC, a Python file and a function in it")
    spec = importlib.util.spec_from_file_location(Path(path).stem, path)
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:  # foreign code runs when its file is imported
        raise UnusableLog(f"the predicate's file {path} cannot be imported ({type(error).__name__}: {error})") from error
    found = getattr(module, function, None)
    if not callable(found):
        raise UnusableLog(f"{path} has no function {function}: write def {function}(before, event, after) -> bool")
    return found
