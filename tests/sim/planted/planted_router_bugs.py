"""Faults of the router: views that drift and do not notice, replicas that must not be chosen, requests that are counted wrongly."""

from __future__ import annotations

from planting import Bug, Edit


def bug(name: str, module: str, old: str, new: str, *found_by: str) -> Bug:
    return Bug(name=name, edits=(Edit(module, old, new),), found_by=found_by)


ROUTER_BUGS = [
    bug(
        "a view goes on behind a lost frame",
        "routing.view",
        "        for event in frame.events:\n            state = reduce(state, event)\n",
        "        for event in frame.events[:-1]:\n            state = reduce(state, event)\n",
        "R1",
    ),
    bug(
        "a view does not compare digests, and misses an event",
        "routing.view",
        "        if self._chain != frame.digest:\n",
        "        state = state if len(frame.events) < 3 else self.state\n        if False:\n",
        "R1",
    ),
    bug(
        "a stream leaves the last event of a long frame out",
        "log.stream",
        "codec.put_frame(frame, codec.encode_body(first_event, events, (), 0, width))",
        "codec.put_frame(frame, codec.encode_body(first_event, events[:2], (), 0, width))",
        "R1",
    ),
    bug(
        "a stream begins with the state before",
        "log.stream",
        "msgspec.structs.replace(self._header, first_event=state.sequence, snapshot=data)",
        "msgspec.structs.replace(self._header, first_event=state.sequence + 1, snapshot=data)",
        "R1",
    ),
    bug(
        "a view keeps its state when the stream has ended",
        "routing.view",
        "        self.state, self._reading, self._rest = None, None, b\"\"\n",
        "        self._reading, self._rest = None, b\"\"\n",
        "R1",
    ),
    bug(
        "a view that lost its stream asks for no other",
        "routing.view",
        "        return self._reading is None and self.mismatches > mismatches and not self.is_hopeless\n",
        "        return False\n",
        "R1",
    ),
    bug(
        "a replica that is not ready is chosen where it is the best",
        "routing.policies",
        "    ready = [place for place, each in enumerate(candidates) if each.is_ready]\n",
        "    ready = list(range(len(candidates))) if any(each.is_ready for each in candidates) else []\n",
        "R2",
    ),
    bug(
        "a router that knows nothing of all chooses among all",
        "routing.router",
        "        return tuple(BLIND if is_ready else each for each, is_ready in zip(found, ready))\n",
        "        return tuple(BLIND for each, is_ready in zip(found, ready))\n",
        "R2",
    ),
    bug(
        "a router without a view of any ready replica gives up",
        "routing.router",
        "        return tuple(BLIND if is_ready else each for each, is_ready in zip(found, ready))\n",
        "        return found\n",
        "R3",
    ),
    bug(
        "a routed request counts when it has arrived, too",
        "routing.view",
        "            if isinstance(event, RequestArrived):\n                self.arrived(event.name, state.planned - sum(plan_of(each) is not None for each in events[place:]))\n",
        "            pass\n\n",
        "R3",
    ),
    bug(
        "a request that was routed elsewhere still counts",
        "routing.router",
        "            self.views[place].done(name)\n",
        "            pass\n",
        "R3",
    ),
]
