"""The request router of vnext's deployment in Ray Serve: vnext's policies on exact views of the replicas.

Owns one follower for each replica, which folds the event stream of its server (vnext/routing/view.py). Implements Ray Serve's
RequestRouter, which asks it for each request, in the process that has the deployment's handle. A replica that is not followed yet
gets requests only where none is.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from contextlib import suppress

import aiohttp
from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from vnext.gateway.asked import TEXT_BYTES_MIN, Asked, read_asked, text_prompt, token_prompt
from vnext.gateway.exchange import KINDS
from vnext.routing.policies import DEFAULT_POLICY, Arriving, Candidate, require_policy, route
from vnext.routing.prompts import Prompt
from vnext.routing.router import BLIND
from vnext.routing.view import View

REQUEST_ID = "x-request-id"
AGAIN_S = 0.25
"""Before an event stream that has ended is asked for again, or a replica sought that may answer."""
UNSEEN_S = 10.0
"""A request that has not arrived by then was refused: its place is not counted any more."""


class Followed:
    """One replica's server and its view, followed from now on. Mutable."""

    def __init__(self, session: aiohttp.ClientSession, url: str, key: str) -> None:
        self.url, self.headers, self.view = url, {"Authorization": f"Bearer {key}"}, View()
        self.session = session
        self._task = asyncio.get_running_loop().create_task(self._follow())

    def end(self) -> None:
        self._task.cancel()

    async def _follow(self) -> None:
        while not self.view.is_hopeless:
            with suppress(aiohttp.ClientError, OSError, TimeoutError):
                await self._stream()
            self.view.begin_again()
            await asyncio.sleep(AGAIN_S)

    async def _stream(self) -> None:
        """Take in the events until they end or the view is lost."""
        timeout = aiohttp.ClientTimeout(total=None)
        async with self.session.get(f"{self.url}/events", headers=self.headers, timeout=timeout) as response:
            response.raise_for_status()
            async for data in response.content.iter_any():
                if self.view.feed(data) or self.view.is_hopeless:
                    return


class ViewRouter(RequestRouter):
    """Ray Serve's interface; requests are calls of LLMServer.ask. Its one keyword is `policy` (vnext/routing/policies.py).
    Mutable."""

    def initialize_state(self, policy: str = DEFAULT_POLICY) -> None:  # type: ignore[override]  # its keywords are those of `app`
        """Raises RoutingPolicyError."""
        require_policy(policy)
        self._policy, self._sequence = policy, 0
        self._followed: dict[ReplicaID, Followed] = {}
        self._placed: OrderedDict[str, tuple[View, float]] = OrderedDict()
        self._session: aiohttp.ClientSession | None = None

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """These are the replicas from now on, with what they say of themselves."""
        super().update_replicas(replicas)
        stated = {each.replica_id: each.routing_stats for each in replicas}
        for id_ in self._followed.keys() - stated.keys():
            self._followed.pop(id_).end()
        for id_, stats in stated.items():
            if stats and id_ not in self._followed:
                self._session = self._session or aiohttp.ClientSession()
                self._followed[id_] = Followed(self._session, stats["url"], stats["key"])

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """The replica that the policy chooses among those that may answer, and behind it the others, for a case in which that one
        takes no more."""
        if pending_request is None or len(pending_request.args) < 4 or not candidate_replicas:
            return [candidate_replicas]
        _, path, headers, body, *wanted = pending_request.args
        may_answer = (each for each in candidate_replicas if not any(wanted) or each.routing_stats.get("fingerprint") in wanted)
        replicas = sorted(may_answer, key=lambda each: each.replica_id.unique_id)
        if not replicas:
            await asyncio.sleep(AGAIN_S)  # Serve asks again at once, and would let nothing else run
            return []
        asked = read_asked(path, body, is_json=True)
        prompt = await self._prompt(path, asked)
        views = [None if (found := self._followed.get(each.replica_id)) is None else found.view for each in replicas]
        arriving = Arriving(tokens=max(len(prompt), asked.tokens), key=asked.key, sequence=self._sequence)
        self._sequence += 1
        chosen = route(self._policy, candidates(views, prompt), arriving)
        assert chosen is not None  # some candidates are ready
        self._place(f"{KINDS.get(path.partition('?')[0], '')}-{headers.get(REQUEST_ID, '')}", views[chosen], prompt)
        return [[replicas[chosen]], [each for each in replicas if each is not replicas[chosen]]]

    async def _prompt(self, path: str, asked: Asked) -> Prompt:
        """By its tokens where these can be hits, which one of the servers is asked for; by its text otherwise."""
        exact = [each for each in self._followed.values() if each.view.is_exact]
        if self._policy == "prefix" and len(exact) > 1 and len(asked.body) >= TEXT_BYTES_MIN:
            server = exact[self._sequence % len(exact)]
            found = await token_prompt(server.session, server.url, path, asked, server.headers.items())
            if found is not None:
                return found
        return text_prompt(asked)

    def _place(self, name: str, view: View | None, prompt: Prompt) -> None:
        """The request counts where it goes until it is seen there; if it is chosen for again, it counts there instead. `name`: how
        the engine's names of it begin."""
        now_s = time.monotonic()
        if name in self._placed:
            self._placed.move_to_end(name, last=False)
        while self._placed and (name in self._placed or now_s - next(iter(self._placed.values()))[1] > UNSEEN_S):
            old, (place, _) = self._placed.popitem(last=False)
            place.done(old)
        if view is not None:
            self._placed[name] = view, now_s
            view.routed(name, prompt)


def candidates(views: list[View | None], prompt: Prompt) -> list[Candidate]:
    """What a policy knows of each replica: of none anything, where none is followed."""
    found = [View().candidate(prompt) if view is None else view.candidate(prompt) for view in views]
    return found if any(each.is_ready for each in found) else [BLIND] * len(views)
