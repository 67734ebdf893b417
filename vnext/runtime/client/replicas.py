"""Replicas: several engines as one client. Each prompt goes to one of them, and goes on at another when that one ends.

Owns what is known of each engine, folded from its events (router/), the seeds of requests that bring none, and what becomes of
requests whose engine has ended: another one that is ready computes them again from their tokens, so their texts stay. They wait
only while no engine is ready. Requests that two engine cores in a row have lost stay with the last one, whose successor tries them
alone (core/trials.py). Where prefill and decode are apart, a prompt goes to an engine of the one kind and then, with a ticket for
its blocks, to one of the other; where a kind is missing, the engines that there are do both. Before that, an engine that encodes
alone is asked for the vectors of a prompt's images or sounds (encode.py).
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

from msgspec.structs import asdict, replace

from vnext.base.spelling import reason
from vnext.base.version import __version__
from vnext.routing.decision_file import DecisionFile, header_of
from vnext.routing.prompts import Prompt
from vnext.routing.router import Router
from vnext.runtime.client.client import EngineClient
from vnext.runtime.client.connection import weights_folder
from vnext.runtime.client.encode import Encode, Encoders
from vnext.runtime.client.followers import Followers
from vnext.runtime.client.output_stream import EngineDead, LiveRequest, OutputStream, Refused
from vnext.runtime.client.pending_operations import NotDone
from vnext.runtime.protocol.messages import SALT_END, EngineReady, EngineStats, RequestOutput, SubmitRequest, derived_seed
from vnext.runtime.protocol.operations import AnyOperation, CallRanks, UpdateWeights
from vnext.runtime.protocol.settings import Roles
from vnext.state.events import AbortReason
from vnext.state.params import NO_POOLING, Sampling, hits_max

DEATHS_MAX = 1
"""Of the engine cores in a row that have lost a request, before it is a suspect."""
ALL_DEATHS = 2**62
KEY_TOKENS, TOKEN_BYTES = 256, 4
"""Requests without a salt whose prompts begin with the same `KEY_TOKENS` have one key of consistent hashing."""
BLIND_POLICIES = ("round_robin", "consistent_hash")
"""Those that ask nothing of an engine, whose events need not be followed then."""
OTHERS = 2**63
"""Added to the numbers of processes, which are thereby no request's."""
Chosen: TypeAlias = "dict[tuple[bytes, bool], int]"
"""The engines of prompts, by whether they hand them over."""
Item = TypeVar("Item")
log = logging.getLogger(__name__)


class Replicas:
    """See the module. It has the interface of EngineClient, and belongs to the event loop that connected it."""

    def __init__(self, addresses: Sequence[str], policy: str, roles: Roles) -> None:
        """`policy`: a name of routing/policies.py."""
        self._roles, writer_count = roles, len(addresses) - roles.encode
        self._router = Router(writer_count, policy)
        self._all = tuple(EngineClient(address, self._share_out, self._router.done) for address in addresses)
        self._clients, self._encoders = self._all[:writer_count], Encoders(self._all[writer_count:])
        self._sequence = count()
        self._root_seed = 0
        self._is_closed = False
        self._decisions: DecisionFile | None = None

    @classmethod
    async def connect(
        cls, addresses: Sequence[str], timeout_s: float | None, policy: str, number: int, roles: Roles
    ) -> Replicas:
        """Wait until each engine core is ready, or has ended. `number`: of this process among those that use the engines; the seeds
        of number 0 are those of one engine that has all requests. Raises what EngineClient.connect does, if none is ready."""
        replicas = cls(addresses, policy, roles)
        begun = [asyncio.ensure_future(client.begin(timeout_s)) for client in replicas._all]
        answers = await asyncio.gather(*begun, return_exceptions=True)
        failed = [each for each in answers[: len(replicas._clients)] if each is not None]
        if len(failed) == len(replicas._clients):
            raise failed[0]
        root_seed = replicas.ready.root_seed
        replicas._root_seed = derived_seed(root_seed, OTHERS + number) if number else root_seed
        if policy not in BLIND_POLICIES:
            replicas._watch()
        replicas._record_decisions(number)
        return replicas

    def _record_decisions(self, number: int) -> None:
        """Keep a log of the router's decisions in the folder of the first engine's log, if it has one on this host."""
        folder, names = Path(self.ready.log_dir), [f"engine {place}" for place in range(len(self._clients))]
        if not self.ready.log_dir or not folder.is_dir():
            return
        try:
            self._decisions = DecisionFile(folder, header_of(__version__, self._router.policy, names), str(number))
        except OSError as error:
            log.warning("the router's decisions are not recorded: %s", reason(error, with_file=True))
            return
        self._router.record, self._router.clock_us = self._decisions.write, self._decisions.clock_us

    @property
    def engines(self) -> tuple[EngineClient, ...]:
        """The clients of single engines, by the engines' numbers."""
        return self._all

    @property
    def followers(self) -> Followers:
        """Those of the first engine."""
        return self._clients[0].followers

    @property
    def ready(self) -> EngineReady:
        """The facts of the first engine that has reported some. The engines have the same settings and the same model."""
        return next(client for client in self._clients if client.was_ready).ready

    @property
    def stats(self) -> EngineStats | None:
        """The sums of the engines' latest figures; what is no number is the first engine's. None before there are any."""
        found = [client.stats for client in self._clients if client.stats is not None]
        if not found:
            return None
        numbers = [name for name, value in asdict(found[0]).items() if isinstance(value, int | float)]
        sums = {name: sum(getattr(stats, name) for stats in found) for name in numbers}
        resident = sum(stats.residence.resident_bytes for stats in found)
        return replace(found[0], residence=replace(found[0].residence, resident_bytes=resident), **sums)

    @property
    def death(self) -> str | None:
        """Why every engine is dead, None while one lives."""
        return _sentence([client.death for client in self._clients])

    @property
    def trouble(self) -> str | None:
        """Why no engine answers at present, None while one does."""
        return _sentence([client.trouble for client in self._clients])

    @property
    def recovering(self) -> str:
        """What is started again, where requests wait for that; "" where an engine goes on."""
        living = [client.recovering for client in self._clients if client.death is None]
        return _sentence(living) or ""

    @property
    def recoveries(self) -> int:
        return sum(client.recoveries for client in self._all)

    @property
    def recovery_seconds(self) -> float:
        return sum(client.recovery_seconds for client in self._all)

    @property
    def live_count(self) -> int:
        return sum(client.live_count for client in self._all)

    def submit_all(self, requests: Sequence[SubmitRequest]) -> OutputStream:
        """As EngineClient does. Requests of one prompt go to one engine."""
        if (death := self.death) is not None:
            raise EngineDead(death)
        names = {request.name for request in requests}
        if len(names) != len(requests) or any(client.has_any(names) for client in self._all):
            raise ValueError("a request's name must be unique among the live requests")
        stream = OutputStream(names, self._drop)
        self._place([LiveRequest(self._seeded(request), stream) for request in requests])
        return stream

    def abort(self, names: Iterable[str], reason: AbortReason) -> None:
        names = tuple(names)
        for client in self._all:
            client.abort(names, reason)

    def abort_all(self, reason: AbortReason) -> None:
        for client in self._all:
            client.abort_all(reason)

    def reset_prefix_cache(self) -> None:
        for client in self._all:
            client.reset_prefix_cache()

    async def operate(self, operation: AnyOperation) -> Any:
        """Carry out an operation on every engine that lives; the first one's value, for CallRanks the values of all ranks. Raises
        NotDone: no engine has done it, unless the sentence names one that has; and EngineDead."""
        asked = self._all if isinstance(operation, CallRanks) else self._clients
        living = [(number, client) for number, client in enumerate(asked) if client.death is None]
        if not living:
            raise EngineDead(self.death or "")
        if missing := [number for number, client in living if not client.is_up]:
            raise NotDone(f"engine {missing[0]} is being started again, so no engine was asked: ask again")
        home = weights_folder(self._clients[0].address)
        own = [operation, *(_own(operation, home, weights_folder(client.address)) for _, client in living[1:])]
        begun = (client.operate(each) for (_, client), each in zip(living, own))
        answers = await asyncio.gather(*begun, return_exceptions=True)
        errors = {number: each for (number, _), each in zip(living, answers) if isinstance(each, BaseException)}
        if errors:
            raise _failure(errors, [number for number, _ in living])
        done = [each for each in answers if not isinstance(each, BaseException)]
        return [value for values in done for value in values] if isinstance(operation, CallRanks) else done[0]

    async def close(self) -> None:
        self._is_closed = True
        await asyncio.gather(*(client.close() for client in self._all))
        if self._decisions is not None:
            self._router.record = None
            self._decisions.close()

    def _drop(self, names: Iterable[str], reason: AbortReason) -> None:
        names = tuple(names)
        for client in self._all:
            client.drop(names, reason)

    def _seeded(self, request: SubmitRequest) -> SubmitRequest:
        """The request with a seed: its own, or one by its number here."""
        number = next(self._sequence)
        if request.has_seed:
            return request
        seed = derived_seed(self._root_seed, number)
        return replace(request, sampling=replace(request.sampling, seed=seed), has_seed=True)

    def _watch(self) -> None:
        """Have the router follow the events of each engine."""
        for number, client in enumerate(self._clients):
            client.followers.add(partial(self._feed, number))

    def _feed(self, number: int, data: bytes) -> None:
        if self._router.views[number].feed(data):
            self._clients[number].followers.ask()

    def _place(self, requests: Iterable[LiveRequest], chosen: Chosen | None = None) -> None:
        """Send requests to engines, those of one prompt to one, which `chosen` has if some of them were sent before."""
        chosen = {} if chosen is None else chosen
        for live in requests:
            if isinstance(live.stream, Encode):
                live = live.stream.given_back()
            elif isinstance(live.stream, Prefill):
                live = live.stream.given_back(live.request.deaths)
            elif self._encoders.take(live, partial(self._encoded, chosen)):
                continue
            if self._is_split and is_worth(live.request, self.ready.config.block_size):
                live = Prefill(live, self._decode).request()
            key = live.request.prompt, live.request.hands_over
            chosen[key] = self._choose(live.request, chosen.get(key))
            self._clients[chosen[key]].take(live)

    def _encoded(self, chosen: Chosen, live: LiveRequest) -> None:
        """The images and sounds of a request are encoded, or are to be encoded where it is computed."""
        if self.death is None:
            self._place([live], chosen)
        else:
            live.stream.fail(EngineDead(self.death))

    @property
    def _is_split(self) -> bool:
        """Whether there is an engine of each kind."""
        kinds = self._clients[: self._roles.prefill], self._clients[self._roles.prefill :]
        return all(any(client.is_up and client.trouble is None for client in kind) for kind in kinds)

    def _decode(self, live: LiveRequest) -> None:
        """The prompt of a request has been computed."""
        self._clients[self._choose(live.request, None)].take(live)

    def _choose(self, request: SubmitRequest, sibling: int | None) -> int:
        """The number of the engine that the policy names, of those that answer; else of those that are ready, else of those that
        live; of these those that do such work, if there are any. `sibling`: that of an earlier request of the same prompt, which
        this one follows if it may."""
        answering = {client for client in self._clients if client.is_up and client.trouble is None}
        ready = {client for client in self._clients if client.is_up}
        living = {client for client in self._clients if client.death is None}
        found = answering or ready or living
        of_kind = self._clients[: self._roles.prefill] if request.hands_over else self._clients[self._roles.prefill :]
        able = [client in (found.intersection(of_kind) or found) for client in self._clients]
        if sibling is not None and able[sibling]:
            able = [number == sibling for number in range(len(able))]
        sampling = replace(request.sampling, adapter=request.adapter.digest if request.adapter else "")
        prompt = Prompt.of(request.prompt, sampling, request.cache_salt, request.generated)
        key = request.cache_salt.rpartition(SALT_END)[2].encode() or request.prompt[: KEY_TOKENS * TOKEN_BYTES]
        number = self._router.choose(request.name, prompt, able, key)
        assert number is not None, "an engine lives"
        return number

    def _share_out(self) -> None:
        """An engine core has ended or is ready: no request waits for one that is not, while another one is."""
        if self._is_closed or self.death is not None:
            return
        self._place(self._encoders.lost())
        any_up = any(client.is_up for client in self._clients)
        for client in self._clients:
            if client.death is not None:
                self._place(client.release(ALL_DEATHS))
            elif not client.is_up and any_up:
                self._place(client.release(DEATHS_MAX))


def _sentence(sentences: Sequence[str | None]) -> str | None:
    """One for all engines, None unless each has one."""
    if not sentences or not all(sentences):
        return None
    return " ".join(f"Engine {number}: {sentence}" for number, sentence in enumerate(sentences))


def _own(operation: AnyOperation, home: Path, folder: Path) -> AnyOperation:
    """The operation for another engine than the first, whose folder is `home`: a file there has a name in the other's folder too,
    so that each engine removes its own."""
    if not isinstance(operation, UpdateWeights):
        return operation
    paths = [Path(path) for path in operation.paths]
    for path in paths:
        if path.parent == home:
            os.link(path, folder / path.name)
    return replace(operation, paths=tuple(str(folder / path.name if path.parent == home else path) for path in paths))


def _failure(errors: dict[int, BaseException], asked: Sequence[int]) -> BaseException:
    """What to raise where engines have failed: the sentence names them, and those that have not."""
    first = errors[min(errors)]
    done = ", ".join(str(number) for number in asked if number not in errors)
    if not done or not isinstance(first, NotDone | EngineDead):
        return first
    failed = "; ".join(f"engine {number}: {error}" for number, error in errors.items())
    return NotDone(f"{failed}; done by engine {done}: ask again, or start the server again")


# ---- a prompt that another engine computes first -----------------------------------------------------------------
# Prefill: a request whose prompt another engine computes first, as the streams of clients see that engine's answer.
#
# The engine of the prompt samples one token, which nobody reads: the engine of the answer computes the last tokens of the prompt
# itself, behind the blocks that it gets, and samples that token again. So an answer comes from one engine alone, whatever becomes
# of the blocks.


def is_worth(request: SubmitRequest, block_size: int) -> bool:
    """Whether another engine could use blocks of this prompt: it has a full one before its last token. A request that an engine has
    lost goes on where its tokens are computed."""
    length, sampling = len(request.prompt) // 4, request.sampling
    has_block = min(length - 1, hits_max(sampling, length)) >= block_size
    return has_block and not request.deaths and not request.ticket and sampling.pooling == NO_POOLING


class Prefill(OutputStream):
    """What stands for the stream of `live` while its prompt is computed; `go_on` gets it, with the ticket, when that is done."""

    def __init__(self, live: LiveRequest, go_on: Callable[[LiveRequest], None]) -> None:
        super().__init__({live.request.name}, lambda names, reason: None)
        self._original, self._go_on = live, go_on

    def request(self) -> LiveRequest:
        own = self._original.request
        sampling = Sampling(seed=0, max_tokens=1, temperature=0.0)
        return LiveRequest(replace(own, sampling=sampling, has_seed=True, hands_over=True), self)

    def given_back(self, deaths: int) -> LiveRequest:
        """The original request, to be computed without a hand-over because `deaths` engine cores in a row have ended with it."""
        self._original.request = replace(self._original.request, deaths=deaths)
        return self._original

    def put(self, output: RequestOutput) -> None:
        if output.finish == "abort":
            self._original.stream.put(output)
        elif output.finish:
            self._original.prefilled = output
            self._original.request = replace(self._original.request, ticket=output.ticket)
            self._go_on(self._original)

    def put_token(self, name: str, token: int) -> None:
        """The one token comes with the end."""

    def fail(self, error: EngineDead | Refused) -> None:
        self._original.stream.fail(error)
