"""Owners: which client asked for which live request, under which name, what that client already knows of it, and what it reads of
an event's outputs and the results of ranks.

Owns the messages that an event's outputs become, one per client, and the drafts of live requests: how many of them became tokens.
A request's first token comes with its name and number.
From then on a token is an entry of two columns, which are cut from the step's own arrays. Sends nothing.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import msgspec
import numpy as np

from vnext.runtime.engine.facility import NO_ERRORS
from vnext.runtime.protocol.messages import Outputs, PromptResult, RequestOutput, TokenLogprobs
from vnext.runtime.protocol.stats import CacheMiss
from vnext.sched.engine import Ready
from vnext.state.fold_commit import MatchedSamples
from vnext.state.outputs import Going, Output
from vnext.state.state import State

News = tuple[Going | None, Sequence[RequestOutput]]
"""Of one event: the requests that go on, and the outputs of the others with their numbers."""
Singles = dict[bytes, list[RequestOutput]]
Places = np.ndarray | slice
"""Of one client's requests in columns."""
EVERY_PLACE = slice(None)


class Owners:
    """Live requests by id, and by client and name. Mutable."""

    def __init__(self) -> None:
        self._owner: dict[int, tuple[bytes, str]] = {}
        self._ids: dict[tuple[bytes, str], int] = {}
        self._live: Counter[bytes] = Counter()  # live requests of each client that has any
        self._reported: set[int] = set()  # requests whose clients know the number
        self._came_s: dict[int, float] = {}  # when each request arrived, while it waits for its first step
        self._waited_s: dict[int, float] = {}  # how long each request waited, until its client has been informed
        self._missed: dict[int, CacheMiss] = {}  # what the cache lacked of each request's prompt, until then
        self._shares: dict[bytes, Places] = {}  # of columns with these ids, all of which their clients know
        self._shares_of = b""

    def add(self, peer: bytes, name: str, id_: int) -> None:
        self._owner[id_] = peer, name
        self._ids[peer, name] = id_
        self._live[peer] += 1
        self._came_s[id_] = time.monotonic()

    def begun(self, ids: Iterable[int], missed: Mapping[int, CacheMiss]) -> None:
        """These requests have been planned into a step; only a request's first step counts. `missed` of some prompts."""
        now_s = time.monotonic()
        self._missed |= missed
        for id_ in ids:
            if (came_s := self._came_s.pop(id_, None)) is not None:
                self._waited_s[id_] = now_s - came_s

    def id_of(self, peer: bytes, name: str) -> int | None:
        """The id of a live request; None for a name that is not live."""
        return self._ids.get((peer, name))

    def names_of(self, peer: bytes) -> list[str]:
        return [name for owner, name in self._ids if owner == peer]

    def letters(self, news: News) -> Iterator[tuple[bytes, Outputs]]:
        """The message of one event to each client; forgets finished requests."""
        going, outputs = news
        singles: Singles = defaultdict(list)
        shares = {} if going is None else self._shares_in(going, singles)
        for output in outputs:
            if (owner := self._owner.get(output.number)) is not None:
                waited_s, missed = self._waited_s.pop(output.number, 0.0), self._missed.pop(output.number, None)
                if waited_s or missed:
                    output = msgspec.structs.replace(output, queue_seconds=waited_s, missed=missed)
                singles[owner[0]].append(output)
                if not output.finish:
                    self._reported.add(output.number)
                    continue
                self._reported.discard(output.number)
                self._came_s.pop(output.number, None)
                del self._ids[owner], self._owner[output.number]
                self._live[owner[0]] -= 1
                if not self._live[owner[0]]:
                    del self._live[owner[0]]
        for peer in dict.fromkeys((*shares, *singles)) if singles else shares:
            numbers = tokens = b""
            if going is not None and (places := shares.get(peer)) is EVERY_PLACE:
                numbers, tokens = self._shares_of, going.tokens.tobytes()
            elif going is not None and places is not None:
                numbers, tokens = going.ids[places].tobytes(), going.tokens[places].tobytes()
            yield peer, Outputs(outputs=tuple(singles[peer]) if peer in singles else (), numbers=numbers, tokens=tokens)

    def _shares_in(self, going: Going, singles: Singles) -> dict[bytes, Places]:
        """Positions of each client's requests in the columns. Requests that a client must be sent by name go to
        `singles`.

        The usual step goes on with the requests of the step before, so their positions stay the same, also where others join.
        """
        ids, count = going.ids.tobytes(), len(going.ids)
        if ids == self._shares_of:
            return self._shares
        first = len(self._shares_of) // 8 if ids.startswith(self._shares_of) else 0
        if first and self._reported.isdisjoint(going.ids[first:].tolist()):
            for place in range(first, count):
                self._begin(going, place, singles)
            return {peer: slice(first) if isinstance(places, slice) else places for peer, places in self._shares.items()}
        numbers, reported = going.ids.tolist(), self._reported
        known = [place for place, id_ in enumerate(numbers) if id_ in reported]
        shares: dict[bytes, list[int]] = defaultdict(list)
        if len(self._live) == 1:
            shares = dict.fromkeys(self._live, known) if known else {}
        else:
            for place in known:
                shares[self._owner[numbers[place]][0]].append(place)
        found: dict[bytes, Places] = {peer: EVERY_PLACE if len(each) == count else np.array(each) for peer, each in shares.items()}
        if len(known) == count:
            self._shares, self._shares_of = found, ids
        for place in sorted(set(range(count)).difference(known)) if len(known) < count else ():
            self._begin(going, place, singles)
        return found

    def _begin(self, going: Going, place: int, singles: Singles) -> None:
        """A request's first token, sent to its client by name, unless the request has left."""
        id_ = int(going.ids[place])
        if (owner := self._owner.get(id_)) is None:
            return
        self._reported.add(id_)
        waited_s, missed = self._waited_s.pop(id_, 0.0), self._missed.pop(id_, None)  # which its first output alone says
        token, hit = going.tokens[place].tobytes(), int(going.cached[place])
        singles[owner[0]].append(
            RequestOutput(name=owner[1], tokens=token, cached_tokens=hit, number=id_, queue_seconds=waited_s, missed=missed)
        )


# ---- what clients read ---------------------------------------------------------------------------------------------


NO_DRAFTS = 0, 0


class Beside(NamedTuple):
    """What the clients of an event's requests get beside its outputs: `prompts` before them; `logprobs`, one entry per sample of a
    step; `errors`, why requests are aborted."""

    prompts: Sequence[RequestOutput] = ()
    logprobs: Sequence[TokenLogprobs | None] = ()
    errors: Mapping[int, str] = NO_ERRORS


NOTHING_BESIDE = Beside()


class ClientNews:
    """Makes what clients are sent of an engine's news. Mutable: counts the drafts of live requests."""

    def __init__(self) -> None:
        self._drafts = DraftCounts()

    def of(self, ready: Ready) -> tuple[list[News], list[int]]:
        """What clients are sent of these events, and the requests that end with them."""
        if ready.state.config.speculation is not None:
            for before, matched in zip(ready.befores, ready.matched):
                if matched is not None:
                    self._drafts.take(before, matched)
        found: list[News] = []
        ended: list[int] = []
        for going, outputs, note in ready.news:
            if note is None and not outputs:
                if going is not None:
                    found.append((going, ()))
                continue
            beside = note if isinstance(note, Beside) else NOTHING_BESIDE
            if beside.prompts:
                found.append((None, beside.prompts))
            if going is not None or outputs:
                errors, counts = beside.errors, self._drafts.counts  # whose drafts are forgotten with a request that ends
                shown = [
                    to_client(
                        each, beside.logprobs, errors.get(each.id, ""), counts.pop(each.id, NO_DRAFTS) if each.finish else NO_DRAFTS
                    )
                    for each in outputs
                ]
                found.append((going, shown))
            ended += [each.id for each in outputs if each.finish]
        return found, ended


class DraftCounts:
    """The accepted and the rejected drafts of each request, by its number. Mutable."""

    def __init__(self) -> None:
        self.counts: dict[int, tuple[int, int]] = {}

    def take(self, before: State, matched: MatchedSamples) -> None:
        """A commit that was folded into `before`. A draft behind the answer's end did not become a token."""
        runs = matched.runs
        if runs is None or not runs.drafted.any():
            return
        taken = np.bincount(matched.rows, minlength=len(before.rows))[runs.rows]
        for id_, count, drafted in zip(before.rows.id[runs.rows].tolist(), taken.tolist(), runs.drafted.tolist()):
            accepted, rejected = self.counts.get(id_, NO_DRAFTS)
            self.counts[id_] = accepted + count - 1, rejected + drafted - count + 1


def prompt_outputs(state: State, results: Sequence[PromptResult]) -> list[RequestOutput]:
    """What the requests that are live get of their prompts. It precedes the outputs of the step that computed it."""
    return [
        RequestOutput(name=state.requests[each.id].name, tokens=b"", number=each.id, prompt=(each,))
        for each in results
        if each.id in state.requests
    ]


def to_client(
    output: Output, logprobs: Sequence[TokenLogprobs | None] | None, error: str = "", drafts: tuple[int, int] = NO_DRAFTS
) -> RequestOutput:
    """A request's output as its client reads it; `logprobs` has one entry per sample of the step, `error` says why the engine
    aborts the request, and `drafts` are those accepted and rejected."""
    scored = logprobs[output.sample] if logprobs and output.sample >= 0 else None
    return RequestOutput(
        name=output.name,
        tokens=b"" if output.token < 0 else output.token.to_bytes(4, "little"),
        finish=output.finish,
        stop_token=output.stop_token,
        cached_tokens=output.cached_tokens,
        logprobs=() if scored is None else (scored,),
        number=output.id,
        error=error,
        accepted_drafts=drafts[0],
        rejected_drafts=drafts[1],
        retained=output.retained,
    )
