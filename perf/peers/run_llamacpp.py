"""llama.cpp through its Python binding: all prompts in one context, batched as its own server batches its slots.

The binding's high-level class answers one prompt after another; this module uses the low-level calls, to measure llama.cpp and
not that class. A common prefix of the prompts is computed once and its cells are copied. Each sequence has its own cells: with
one pool for all (`kv_unified`) every token attends over the cells of all sequences.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import protocol

BATCH_TOKENS_MAX = 2048
# Sequences of a context and cells of each: one for a prompt alone, one for a batch; only the one in use exists.
ALONE, TOGETHER = (1, 8192), (32, 640)
SHARED_MIN = 32  # shorter common beginnings are not worth a batch of their own

# One token of a batch: (token, position, sequence, whether logits are wanted).
Entry = tuple[int, int, int, bool]


class LlamaCpp:
    """Weights as a GGUF file has them, the cache in float16 (the default), flash attention as llama.cpp decides."""

    def __init__(self, model: Path, threads: int) -> None:
        import llama_cpp
        import numpy

        self._api, self._numpy = llama_cpp, numpy
        llama_cpp.llama_backend_init()
        loading = llama_cpp.llama_model_default_params()
        self._model = llama_cpp.llama_model_load_from_file(str(model).encode(), loading)
        if not self._model:
            raise RuntimeError(f"llama.cpp could not load {model}")
        self._threads, self._geometry, self._context = threads, (0, 0), None
        self._batch = llama_cpp.llama_batch_init(BATCH_TOKENS_MAX, 0, 1)
        self._vocab_size = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self._model))

    def _clear(self, geometry: tuple[int, int]) -> None:
        """Empty the cache; a context of another geometry takes the place of the present one (in a row's warm-up)."""
        if geometry != self._geometry:
            if self._context is not None:
                self._api.llama_free(self._context)
            self._context = self._api.llama_init_from_model(self._model, self._context_params(*geometry))
            if not self._context:
                raise RuntimeError(f"llama.cpp could not make a context of {geometry} sequences and cells")
            self._geometry, self._memory = geometry, self._api.llama_get_memory(self._context)
        self._api.llama_memory_clear(self._memory, False)

    def _context_params(self, sequences: int, cells: int) -> Any:
        params = self._api.llama_context_default_params()
        params.n_ctx, params.n_seq_max, params.kv_unified = sequences * cells, sequences, False
        params.n_batch, params.n_threads, params.n_threads_batch = BATCH_TOKENS_MAX, self._threads, self._threads
        return params

    def generate(self, prompts: list[list[int]], lengths: list[int]) -> list[list[int]]:
        self._clear(ALONE if len(prompts) == 1 else TOGETHER)
        shared = self._compute_shared(prompts)
        answers: list[list[int]] = [[] for _ in prompts]
        pending = [
            (token, position, index, position == len(prompt) - 1)
            for index, prompt in enumerate(prompts)
            for position, token in enumerate(prompt[shared:], start=shared)
        ]
        while pending:
            for index, token in self._compute(pending):
                answers[index].append(token)
            pending = [
                (answers[index][-1], len(prompts[index]) + len(answers[index]) - 1, index, True)
                for index in range(len(prompts))
                if len(answers[index]) < lengths[index]
            ]
        return answers

    def _compute_shared(self, prompts: list[list[int]]) -> int:
        """Compute the common prefix once for all prompts; return its number of tokens, 0 if it is too short."""
        shared = len(os.path.commonprefix(prompts)) if len(prompts) > 1 else 0
        shared = min(shared, min(map(len, prompts)) - 1)
        if shared < SHARED_MIN:
            return 0
        self._compute([(token, position, 0, False) for position, token in enumerate(prompts[0][:shared])])
        for index in range(1, len(prompts)):
            self._api.llama_memory_seq_cp(self._memory, 0, index, -1, -1)
        return shared

    def _compute(self, entries: list[Entry]) -> list[tuple[int, int]]:
        """Run entries through the model; (sequence, likeliest next token) of each that wants logits."""
        sampled = []
        for start in range(0, len(entries), BATCH_TOKENS_MAX):
            part = entries[start : start + BATCH_TOKENS_MAX]
            self._fill(part)
            status = self._api.llama_decode(self._context, self._batch)
            if status != 0:
                raise RuntimeError(f"llama_decode says {status}: is the job larger than the context?")
            sampled += [(entry[2], self._likeliest(place)) for place, entry in enumerate(part) if entry[3]]
        return sampled

    def _fill(self, entries: list[Entry]) -> None:
        batch = self._batch
        batch.n_tokens = len(entries)
        for place, (token, position, sequence, wanted) in enumerate(entries):
            batch.token[place] = token
            batch.pos[place] = position
            batch.n_seq_id[place] = 1
            batch.seq_id[place][0] = sequence
            batch.logits[place] = wanted

    def _likeliest(self, place: int) -> int:
        pointer = self._api.llama_get_logits_ith(self._context, place)
        return int(self._numpy.ctypeslib.as_array(pointer, (self._vocab_size,)).argmax())

    def about(self) -> dict[str, Any]:
        settings = {"n_batch": BATCH_TOKENS_MAX, "cells_alone": ALONE, "cells_together": TOGETHER, "kv_unified": False}
        system = self._api.llama_print_system_info().decode()
        return {"llama_cpp_python": self._api.__version__, "system": system, **settings}

    def roots(self) -> list[int]:
        return [os.getpid()]

    def close(self) -> None:
        self._api.llama_batch_free(self._batch)
        self._api.llama_free(self._context)
        self._api.llama_model_free(self._model)


if __name__ == "__main__":
    protocol.run(LlamaCpp)
