"""Reasoning: told apart from the answer wherever the pieces of a text end."""

from __future__ import annotations

import random

import msgspec
import pytest

from vnext.text.parts import Part, Reasoning, Words
from vnext.text.reasoning import Marks, ReasoningParser, marks_of
from vnext.text.template import ChatTemplate

THINK = Marks("<think>", "</think>")
TEXTS: list[tuple[bool, str, list[Part]]] = [
    (False, "<think>\nfour < five\n</think>\n\nNine. ", [Reasoning("four < five"), Words("Nine. ", 30)]),
    (True, "four\n\n five</think>Nine", [Reasoning("four\n\n five"), Words("Nine", 19)]),
    (True, "<think>repeated</think> Nine", [Reasoning("repeated"), Words("Nine", 24)]),
    (True, "cut off </thi", [Reasoning("cut off </thi")]),
    (True, "cut off  ", [Reasoning("cut off  ")]),
    (False, "<think>cut", [Reasoning("cut")]),
    (False, "<think>\n\n</think>\n\n", []),
    (False, "<thinking>", [Words("<thinking>")]),
    (False, " \n<thi", [Words(" \n<thi")]),
    (False, "No <think>mark</think> here ", [Words("No <think>mark</think> here ")]),
    (False, "<think>a</think>b<think>c</think>", [Reasoning("a"), Words("b<think>c</think>", 16)]),
    (False, "", []),
]


@pytest.mark.parametrize(("begun", "text", "expected"), TEXTS)
def test_every_cut_gives_the_same_parts(begun: bool, text: str, expected: list[Part]) -> None:
    rng = random.Random(3)
    size = len(text)
    cuts = [[place] for place in range(size + 1)] + [sorted(rng.choices(range(size + 1), k=9)) for _ in range(40)]
    for places in [*cuts, [*range(size)]]:
        parser, found = ReasoningParser(THINK, begun, None), []
        for start, stop in zip([0, *places], [*places, size]):
            found += parser.push(text[start:stop])
        assert joined_of(found + parser.finish()) == expected, places


WORDY = Marks("Here is my thought process:", "Here is my response:")
CUT: list[tuple[Marks, bool, str, list[Part]]] = [
    (THINK, True, "cut off </thi", [Reasoning("cut off")]),
    (THINK, True, "cut off </think", [Reasoning("cut off")]),
    (THINK, True, "cut off <", [Reasoning("cut off <")]),
    (THINK, True, "cut off  ", [Reasoning("cut off  ")]),
    (THINK, False, " \n<thi", []),
    (THINK, False, "<", [Words("<")]),
    (THINK, False, "<thy", [Words("<thy")]),
    (THINK, False, "<think>", []),
    (WORDY, False, "Here is", [Words("Here is")]),
    (WORDY, True, "so. Here is", [Reasoning("so. Here is")]),
]


@pytest.mark.parametrize(("marks", "begun", "text", "expected"), CUT)
def test_an_answer_that_is_cut_within_a_mark_shows_none_of_it(marks: Marks, begun: bool, text: str, expected: list[Part]) -> None:
    for pieces in ([text], [*text], ["", text]):
        parser = ReasoningParser(marks, begun, None)
        found = [part for piece in pieces for part in parser.push(piece)]
        assert joined_of(found + parser.finish(cut=True)) == expected


@pytest.mark.parametrize("begin", ["", "<think>x"])
def test_a_run_of_space_is_looked_at_seldom(begin: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each look reads all that is held: one look a token would make the time quadratic."""
    looks = []
    for name in ("_begin", "_inside"):
        step = getattr(ReasoningParser, name)
        monkeypatch.setattr(ReasoningParser, name, lambda parser, ended, step=step: looks.append(ended) or step(parser, ended))
    parser, text = ReasoningParser(THINK, False, None), begin + " " * 20_000
    parts = [part for character in text for part in parser.push(character)] + parser.finish()
    assert joined_of(parts) == ([Reasoning(text.removeprefix("<think>"))] if begin else [Words(text)])
    assert len(looks) < 600


def joined_of(parts: list[Part]) -> list[Part]:
    found: list[Part] = []
    for part in parts:
        if found and type(found[-1]) is type(part):
            part = msgspec.structs.replace(last := found.pop(), text=last.text + part.text)
        found.append(part)
    return found


def test_an_answer_is_plain_once_its_words_have_begun() -> None:
    parser = ReasoningParser(THINK, True, None)
    assert parser.push("a</think>\n") == [Reasoning("a")] and parser.is_over and not parser.is_plain
    assert parser.push("b") == [Words("b", 10)] and parser.is_plain


def test_the_template_tells_the_marks_and_the_prompt_what_is_expected() -> None:
    assert marks_of("{{ messages }}") is None
    assert marks_of("{{ x.split('[/THINK]') }}") == Marks("[THINK]", "[/THINK]")
    marks = ChatTemplate("{% if enable_thinking is false %}<think>\n\n</think>\n{% endif %}", {}).marks
    assert marks == Marks("<think>", "</think>", is_closed_off=True)
    assert ChatTemplate("{% if enable_thinking %}<think>{% endif %}{# </think> #}", {}).marks == THINK
    assert ChatTemplate("{{ raise_exception('no') }}</think>", {}).marks == THINK
    assert marks.are_open("<|assistant|><think>\n") and not marks.are_open("<think>?<|assistant|>")
    assert marks.are_expected("<|assistant|>") and not marks.are_expected("<|assistant|><think>\n\n</think>\n\n")
    assert not THINK.are_expected("<|assistant|>") and THINK.are_expected("<|assistant|><think>")
