"""Reasoning: separates what a model thinks before it answers from the answer.

Owns the marks around reasoning, the choice of them from a chat template, and the text held back while it may be a mark. What
follows the reasoning goes to another parser. Marks inside the answer itself are words: only what an answer begins with is
reasoning. Space around the marks belongs to neither side.

    <think> ... </think>      Qwen 3, DeepSeek R1 and V3.1, GLM 4.5, SmolLM 3, Granite 3.3
    [THINK] ... [/THINK]      Magistral
    Here is my thought process: ... Here is my response:      Granite 3.2
    <seed:think> ... </seed:think>                            Seed OSS
    <|channel|>analysis<|message|> ... <|end|>                gpt-oss, whose answer is another message
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec

from vnext.state.params import Constraint
from vnext.text.parts import SHARE_LOOKED_AT, Part, Reasoning, Words


class Parser(Protocol):
    """Turns the text of one answer into parts."""

    def push(self, text: str) -> list[Part]:
        """Take in a text; returns the parts that are certain by now."""

    def finish(self, cut: bool = False) -> list[Part]:
        """The rest: the text has ended. `cut`: before the model ended it."""


class Marks(msgspec.Struct, frozen=True):
    """The texts around reasoning. `is_closed_off`: prompts end with the closing mark when reasoning is switched off.
    `answer`: what the model writes between its reasoning and the answer itself. Such a model may leave its reasoning out
    altogether, so the prompt of a constrained answer begins it."""

    open: str
    close: str
    is_closed_off: bool = False
    answer: str = ""

    def are_open(self, prompt: str) -> bool:
        """Whether the prompt begins the reasoning that its answer continues."""
        return prompt.rstrip().endswith(self.open)

    def are_expected(self, prompt: str) -> bool:
        """Whether the answer to a prompt begins with reasoning, by all that the template shows."""
        return self.are_open(prompt) or (self.is_closed_off and not prompt.rstrip().endswith(self.close))


HARMONY = Marks("<|channel|>analysis<|message|>", "<|end|>", answer="<|start|>assistant<|channel|>final<|message|>")
THINK, MISTRAL = Marks("<think>", "</think>"), Marks("[THINK]", "[/THINK]")
GRANITE = Marks("Here is my thought process:", "Here is my response:")
SEED = Marks("<seed:think>", "</seed:think>")
KNOWN = (HARMONY, THINK, MISTRAL, SEED, GRANITE)
NAMES = dict.fromkeys(("deepseek_r1", "deepseek_v3", "deepseek_v31", "qwen3", "glm45", "olmo3", "ernie45", "minimax_m2"), THINK) | {
    "mistral": MISTRAL, "granite": GRANITE, "seed_oss": SEED, "openai_gptoss": HARMONY,
}  # fmt: skip
"""vLLM's names of --reasoning-parser for the marks."""


def with_reasoning(
    constraint: Constraint | None, marks: tuple[Sequence[int], Sequence[int]], is_begun: bool, budget: int | None
) -> Constraint | None:
    """The constraint of an answer that may begin with reasoning: it holds from the tokens of the closing mark on. `budget`
    bounds the tokens between the marks; the answer writes the opening mark itself unless the prompt has begun it, and one that does
    not has no reasoning."""
    if constraint is None and budget is None:
        return None
    reasoning_max = -1 if budget is None else budget + (0 if is_begun else len(marks[0]))
    return Constraint(
        grammar=constraint.grammar if constraint else "", reasoning_end=tuple(marks[1]), reasoning_max=reasoning_max,
        reasoning_begin=() if is_begun else tuple(marks[0]),
    )  # fmt: skip


def marks_of(template: str, reasoning_parser: str = "") -> Marks | None:
    """The marks in a chat template, None where it knows none, or those of vLLM's parser of this name. Raises ValueError for an
    unknown name, with those known."""
    if reasoning_parser and reasoning_parser not in NAMES:
        known = ", ".join(sorted(NAMES))
        raise ValueError(f"--reasoning-parser is {reasoning_parser!r}: it must be one of {known}, or be left out.")
    if reasoning_parser:
        return NAMES[reasoning_parser]
    return next((marks for marks in KNOWN if (marks.open if marks.answer else marks.close) in template), None)


class ReasoningParser:
    """A Parser of an answer that may begin with reasoning. `begun`: the prompt has already written the opening mark.
    `rest` parses what follows the reasoning, None where that is words."""

    def __init__(self, marks: Marks, begun: bool, rest: Parser | None) -> None:
        self._marks = marks
        self._rest = rest
        self._held = self._waiting = ""
        self._received = self._rest_start = 0  # characters, up to the end of `held`, and up to what `rest` gets
        self._step: Callable[[bool], list[Part]] = self._begin
        self._begun = begun
        self._shown = self._has_words = False
        self._is_cut = False
        self.is_over = False
        self.is_plain = False

    def push(self, text: str) -> list[Part]:
        self._waiting += text
        if len(self._waiting) * SHARE_LOOKED_AT < len(self._held):
            return []
        self._take_waiting()
        return self._step(False)

    def finish(self, cut: bool = False) -> list[Part]:
        self._take_waiting()
        self._is_cut = cut
        return self._step(True) + (self._placed(self._rest.finish(cut)) if self._rest else [])

    def _take_waiting(self) -> None:
        self._received += len(self._waiting)
        self._held, self._waiting = self._held + self._waiting, ""

    def _begin(self, ended: bool) -> list[Part]:
        """At the answer's first characters, which may be the opening mark."""
        text = self._held.lstrip()
        if self._marks.open.startswith(text) and (not ended or self._is_cut_within(self._marks.open, len(text))):
            return []
        if text.startswith(self._marks.open):
            self._held = text[len(self._marks.open) :]
        elif not self._begun:
            return self._end(ended)
        self._step = self._inside
        return self._inside(ended)

    def _inside(self, ended: bool) -> list[Part]:
        if not self._shown:
            self._held = self._held.lstrip()
        place = self._held.find(self._marks.close)
        if place >= 0:
            text, self._held = self._held[:place].rstrip(), self._held[place + len(self._marks.close) :].lstrip()
            return self._reasoning(text) + self._end(ended, after=True)
        size = overlap(self._held, self._marks.close)
        whole = ended and not self._is_cut_within(self._marks.close, size)
        certain = self._held if whole else self._held[: len(self._held) - size].rstrip()
        self._held = self._held[len(certain) :]
        return self._reasoning(certain)

    def _is_cut_within(self, mark: str, size: int) -> bool:
        """Whether an answer that was cut behind the first `size` characters of a mark began it, and did not write words."""
        return self._is_cut and 1 < size < len(mark) and not mark[0].isalpha()

    def _end(self, ended: bool, after: bool = False) -> list[Part]:
        """The reasoning is over, or there is none."""
        self.is_over = True
        self._step = self._space if after else self._words
        return self._step(ended)

    def _space(self, ended: bool) -> list[Part]:
        self._held = self._held.lstrip()
        if not self._held:
            return []
        self._step = self._words
        return self._words(ended)

    def _words(self, _: bool) -> list[Part]:
        text, self._held = self._held, ""
        start = self._received - len(text)
        if self._rest is None:
            self.is_plain = True
            return [Words(text, start)] if text else []
        if not self._has_words:
            self._rest_start, self._has_words = start, True
        return self._placed(self._rest.push(text)) if text else []

    def _placed(self, parts: list[Part]) -> list[Part]:
        """The parts of what follows the reasoning, at their places in the whole text."""
        return [Words(part.text, part.start + self._rest_start) if isinstance(part, Words) else part for part in parts]

    def _reasoning(self, text: str) -> list[Part]:
        self._shown = self._shown or text != ""
        return [Reasoning(text)] if text else []


def overlap(text: str, mark: str) -> int:
    """Length of the longest end of the text that begins the mark."""
    return next((size for size in range(min(len(text), len(mark) - 1), 0, -1) if text.endswith(mark[:size])), 0)
