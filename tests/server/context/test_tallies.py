"""Our histogram and counter say what Prometheus' own would."""

from __future__ import annotations

from hypothesis import given, strategies as st
from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest

from vnext.server.context import tallies

BOUNDS_S = (0.001, 0.0025, 0.5, 2)


@given(st.lists(st.tuples(st.sampled_from((0.0, *BOUNDS_S, 0.0011, 0.4, 7.0)), st.integers(1, 5))))
def test_a_histogram_s_exposition_is_the_librarys(reported: list[tuple[float, int]]) -> None:
    theirs, ours = CollectorRegistry(), CollectorRegistry()
    histogram, times = Histogram("times", "Help.", buckets=BOUNDS_S, registry=theirs), tallies.Histogram("times", "Help.", BOUNDS_S)
    ours.register(times)
    for seconds, count in reported:
        times.observe(seconds, count)
        for _ in range(count):
            histogram.observe(seconds)
    assert counted(ours) == counted(theirs)


@given(st.lists(st.tuples(st.sampled_from("ab"), st.sampled_from("xy\n"))))
def test_a_counter_s_exposition_is_the_librarys(reported: list[tuple[str, str]]) -> None:
    theirs, ours = CollectorRegistry(), CollectorRegistry()
    counter = Counter("ends", "Help.", ("why", "how"), registry=theirs)
    ends = tallies.LabelledCounter("ends", "Help.", ("why", "how"))
    ours.register(ends)
    for values in reported:
        ends.add(*values)
        counter.labels(*values).inc()
    assert counted(ours) == counted(theirs)


def test_a_counter_without_labels_shows_nought_before_it_counts() -> None:
    theirs, ours = CollectorRegistry(), CollectorRegistry()
    counter, ends = Counter("ends", "Help.", registry=theirs), tallies.LabelledCounter("ends", "Help.", ())
    ours.register(ends)
    for _ in range(2):
        assert counted(ours) == counted(theirs)
        counter.inc()
        ends.add()


def counted(registry: CollectorRegistry) -> dict[str, float]:
    """Without the moment of its making, which ours has not, and the sum rounded: it is added up in another way."""
    lines = (line.rsplit(" ", 1) for line in generate_latest(registry).decode().splitlines() if not line.startswith("#"))
    return {name: round(float(value), 6) for name, value in lines if "_created" not in name}
