"""Stop strings: found wherever the pieces' borders lie, nothing of them leaks, nothing else is lost."""

from __future__ import annotations

from hypothesis import given, settings, strategies as st

from vnext.text.answer import StopScanner


def scan(pieces: list[str], stops: list[str], include: bool = False) -> tuple[str, str | None]:
    scanner = StopScanner(stops, include)
    out = ""
    for piece in pieces:
        out += scanner.push(piece)
        if scanner.found is not None:
            return out, scanner.found
    return out + scanner.finish(), None


def test_across_borders() -> None:
    assert scan(["hel", "lo wo", "rld"], ["o w"]) == ("hell", "o w")
    assert scan(["a", "b", "c", "d"], ["bc"]) == ("a", "bc")
    assert scan(["abc"], ["bc"], include=True) == ("abc", "bc")


def test_a_beginning_is_held_back_and_given_out_when_it_was_none() -> None:
    scanner = StopScanner(["\n\nUser:"])
    assert scanner.push("Hi\n") == "Hi"
    assert scanner.push("\nUse") == ""
    assert scanner.push("ful") == "\n\nUseful"
    assert scanner.push("\n") == ""
    assert scanner.finish() == "\n"


def test_repeated_beginnings() -> None:
    assert scan(["aa", "a", "ab"], ["aab"]) == ("aa", "aab")
    assert scan(["abab", "ac"], ["abac"]) == ("ab", "abac")


def test_the_first_completed_wins_and_of_those_the_longest() -> None:
    assert scan(["say stop now"], ["now", "stop"]) == ("say ", "stop")
    assert scan(["abcd"], ["bcd", "c"]) == ("ab", "c")
    assert scan(["abc"], ["c", "bc"]) == ("a", "bc")


def test_without_stops_nothing_is_held() -> None:
    scanner = StopScanner([])
    assert scanner.push("abc") == "abc" and scanner.finish() == ""


def reference(text: str, stops: list[str], include: bool) -> tuple[str, str | None]:
    """Character by character, the plain meaning."""
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            found = max(ending, key=len)
            return text[: end if include else end - len(found)], found
    return text, None


@settings(max_examples=500, deadline=None)
@given(
    pieces=st.lists(st.text("ab\n", max_size=4), max_size=12),
    stops=st.lists(st.text("ab\n", min_size=1, max_size=4), max_size=3),
    include=st.booleans(),
)
def test_any_cutting_means_the_same(pieces: list[str], stops: list[str], include: bool) -> None:
    assert scan(pieces, stops, include) == reference("".join(pieces), stops, include)
