"""Instruction sets as an option: every one that this machine has serves, and greedy texts are the same on all."""

from __future__ import annotations

from functools import cache

import pytest
from engine_here import OWN_LEVEL

from vnext import LLM, SamplingParams
from vnext.kernels.cpu import native
from vnext.runtime.processes.launch import StartRefused
from vnext.runtime.protocol.settings import SettingsError

PROMPTS = ["What is Python?", "def main(", "The standard library", "Return the number of", "a", "An exception is raised when"]
LEVELS = native.levels() if native.is_built() else ()
NAMES = [level.name.lower() for level in LEVELS]
LACKING = [level.name.lower() for level in native.Level if native.is_built() and level not in LEVELS]


@cache
def answers(isa: str) -> tuple[dict[str, str], list[list[int]]]:
    """The engine's environment, and greedy tokens."""
    with LLM(isa=isa, dtype="float32", threads=1, log="off") as llm:
        found = llm.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=60), use_tqdm=False)
        return dict(llm.ready.environment), [answer.outputs[0].token_ids for answer in found]


@pytest.mark.skipif(not NAMES, reason="the CPU kernels were not compiled here")
@pytest.mark.parametrize("isa", NAMES)
def test_greedy_texts_are_the_same_on_every_instruction_set(isa: str) -> None:
    environment, tokens = answers(isa)
    assert environment["kernels"] == isa.upper()
    assert tokens == answers(NAMES[0])[1]


@pytest.mark.skipif(not NAMES, reason="the CPU kernels were not compiled here")
def test_the_usual_instruction_set_is_the_fastest() -> None:
    """The best, but for Intel's AVX512_BF16."""
    assert OWN_LEVEL is not None and answers("auto")[0]["kernels"] == OWN_LEVEL.name
    assert OWN_LEVEL is native.best_level() or (OWN_LEVEL.name, native.best_level().name) == ("AVX512", "AVX512_BF16")


@pytest.mark.skipif(not NAMES, reason="the CPU kernels were not compiled here")
def test_an_instruction_set_that_is_not_here_is_refused() -> None:
    with pytest.raises(StartRefused, match=f"isa is {LACKING[-1]}: this machine has no .*; the best it has is {NAMES[-1].upper()}"):
        LLM(isa=LACKING[-1])


def test_an_unknown_instruction_set_is_refused() -> None:
    with pytest.raises(SettingsError, match="isa is 'sse9': it must be one of 'auto', 'portable'"):
        LLM(isa="sse9")
