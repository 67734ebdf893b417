"""Event streams of an engine core: a client that subscribes has its state, through recoveries, and while it does not read."""

from __future__ import annotations

import zmq
from test_core import Bench, make_bench, wish  # noqa: F401  a fixture
from test_rank_recovery import Ranks, killed, recovery_of

from vnext.routing.view import View
from vnext.runtime.protocol.messages import AbortRequests, Events, Goodbye, Hello, Subscribe
from vnext.state.digest import digest


def follow(bench: Bench, socket: zmq.Socket, view: View) -> int:
    """Feed a view with what has arrived; returns the number of messages with records."""
    parts = [message.data for message in bench.heard(socket) if isinstance(message, Events)]
    for part in parts:
        view.feed(part)
    return sum(map(bool, parts))


def test_a_subscriber_has_the_engines_state(make_bench) -> None:  # noqa: F811
    bench = make_bench(privacy="shape")
    asking, watching, view = bench.client(), bench.client(), View()
    bench.say(asking, Hello(), wish("before", [1, 2, 3, 4, 5], max_tokens=30))
    bench.say(watching, Hello(), Subscribe())
    assert follow(bench, watching, view) >= 1 and view.snapshots == 1
    for number in range(6):
        bench.say(asking, wish(f"r{number}", [1, 2, 3, 4, number], max_tokens=4 + number))
        follow(bench, watching, view)
        assert view.state is not None and digest(view.state) == digest(bench.core.state)
    bench.say(asking, AbortRequests(names=("before",), reason="client"))
    bench.turn(200)
    follow(bench, watching, view)
    assert view.state is not None and view.state.sequence == bench.core.state.sequence and view.mismatches == 0
    assert view.state.token_digest == bench.core.state.token_digest, "its tokens are the real ones, also where the log has none"
    assert bench.verified()


def test_who_does_not_ask_gets_nothing_and_who_leaves_costs_nothing(make_bench) -> None:  # noqa: F811
    bench = make_bench()
    asking, watching = bench.client(), bench.client()
    bench.say(asking, Hello(), wish("a", [1, 2, 3]))
    bench.say(watching, Hello(), Subscribe())
    assert len(bench.core._streams.readers) == 1
    bench.say(watching, Subscribe(is_on=False))
    assert not bench.core._streams.readers
    bench.say(watching, Subscribe())
    bench.say(watching, Goodbye())
    bench.say(asking, wish("b", [1, 2, 3]))
    assert not bench.core._streams.readers
    assert not [message for message in bench.heard(asking) if isinstance(message, Events)]


def test_a_subscriber_that_does_not_read_is_told_and_asks_again(make_bench) -> None:  # noqa: F811
    bench = make_bench()
    asking, watching, view = bench.client(), bench.client(), View()
    bench.say(watching, Hello(), Subscribe())
    bench.say(asking, Hello())
    real, bench.core._clients._is_sent = bench.core._clients._is_sent, lambda peer, message: False
    bench.say(asking, wish("a", [1, 2, 3]))
    bench.core._clients._is_sent = real
    assert not bench.core._streams.readers
    bench.turn()
    messages = [message for message in bench.heard(watching) if isinstance(message, Events)]
    assert messages[-1].data == b"", "its stream has ended"
    for message in messages:
        view.feed(message.data)
    assert not view.is_exact and view.mismatches == 0
    bench.say(watching, Subscribe())
    bench.turn()
    follow(bench, watching, view)
    assert view.is_exact and view.state.sequence == bench.core.state.sequence


def test_a_subscriber_follows_through_a_recovery_of_the_ranks(make_bench) -> None:  # noqa: F811
    ranks = Ranks(lambda plans: killed() if plans == 4 else None)
    bench, view = make_bench(ranks, recovery=recovery_of([])), View()
    watching = bench.client()
    bench.say(watching, Hello(), Subscribe(), wish("a", [1, 2, 3, 4, 5], max_tokens=20))
    bench.turn(300)
    follow(bench, watching, view)
    assert bench.core._recovery.count == 1
    assert view.state is not None and digest(view.state) == digest(bench.core.state) and view.snapshots == 1
