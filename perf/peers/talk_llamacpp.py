"""llama.cpp through the class of its Python binding that keeps what was computed: a prompt that begins as the last one goes on from there.

For talks (perf/agent_talk.py); run_llamacpp.py has what the class leaves out, batches of prompts.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import protocol

POSITIONS, BATCH_TOKENS_MAX = 8192, 2048


class LlamaCppTalk:
    """One prompt at a time, greedily. `about` names the seconds from the last one to its first token."""

    def __init__(self, model: Path, threads: int) -> None:
        import llama_cpp

        self._version, self._first_s = llama_cpp.__version__, 0.0
        sizes = {"n_ctx": POSITIONS, "n_batch": BATCH_TOKENS_MAX, "n_threads": threads, "n_threads_batch": threads}
        self._llama = llama_cpp.Llama(str(model), verbose=False, **sizes)

    def generate(self, prompts: list[list[int]], lengths: list[int]) -> list[list[int]]:
        return [self._answer(prompt, length) for prompt, length in zip(prompts, lengths)]

    def _answer(self, prompt: list[int], length: int) -> list[int]:
        begin_s, answer = time.perf_counter(), list[int]()
        for token in self._llama.generate(prompt, temp=0.0):
            self._first_s = self._first_s if answer else time.perf_counter() - begin_s
            answer.append(int(token))
            if len(answer) == length:
                break
        return answer

    def about(self) -> dict[str, Any]:
        return {"llama_cpp_python": self._version, "n_batch": BATCH_TOKENS_MAX, "first_token_s": self._first_s}

    def roots(self) -> list[int]:
        return [os.getpid()]

    def close(self) -> None:
        self._llama.close()


if __name__ == "__main__":
    protocol.run(LlamaCppTalk)
