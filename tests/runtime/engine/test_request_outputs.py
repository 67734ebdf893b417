"""What the clients are still to be sent: nothing where an event had nothing for them."""

from __future__ import annotations

from types import SimpleNamespace

from vnext.runtime.engine.owners import ClientNews
from vnext.state.outputs import Output


def ready(*news: object) -> SimpleNamespace:
    return SimpleNamespace(state=SimpleNamespace(config=SimpleNamespace(speculation=None)), befores=(), matched=(), news=news)


def test_nothing_is_sent_of_events_without_news() -> None:
    assert ClientNews().of(ready((None, (), None))) == ([], [])


def test_who_ends_is_named_and_what_goes_on_is_kept() -> None:
    going = object()
    ended = Output(4, "r4", 7, 0, "length", -1, 0)
    news, gone = ClientNews().of(ready((going, (), None), (None, (ended,), None)))
    assert gone == [4] and [each[0] for each in news] == [going, None]
