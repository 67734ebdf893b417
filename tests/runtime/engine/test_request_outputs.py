"""What the clients are still to be sent: nothing where an event had nothing for them."""

from __future__ import annotations

from types import SimpleNamespace

from vnext.runtime.engine.request_outputs import Unsent
from vnext.state.outputs import Output


def ready(*news: object) -> SimpleNamespace:
    return SimpleNamespace(state=SimpleNamespace(config=SimpleNamespace(speculation=None)), befores=(), matched=(), news=news)


def test_nothing_is_sent_of_events_without_news() -> None:
    unsent = Unsent()
    assert unsent.add(ready((None, (), None))) == [] and unsent.take() == []


def test_who_ends_is_named_and_what_goes_on_is_kept() -> None:
    unsent, going = Unsent(), object()
    ended = Output(4, "r4", 7, 0, "length", -1, 0)
    assert unsent.add(ready((going, (), None), (None, (ended,), None))) == [4]
    assert [each[0] for each in unsent.take()] == [going, None] and unsent.take() == []
