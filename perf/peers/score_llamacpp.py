"""Log-probabilities by llama.cpp: `score_llamacpp.py MODEL TOKENS.npy OUT.npy`; another type: `score_llamacpp.py MODEL TYPE OUT.gguf`.

Runs in the environment of the engine llamacpp. TOKENS holds windows [n, w] of token ids, each computed in one batch in an empty
context; OUT gets the logits, float32 [n, w, vocabulary]. TYPE is one of TYPES, into which all matrices are converted.
"""

from __future__ import annotations

import sys
from pathlib import Path

import llama_cpp
import numpy as np

TYPES = {
    "F32": llama_cpp.LLAMA_FTYPE_ALL_F32, "Q8_0": llama_cpp.LLAMA_FTYPE_MOSTLY_Q8_0, "Q4_0": llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_0,
}  # fmt: skip


def converted(model: Path, kind: str, out: Path) -> None:
    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype, params.allow_requantize = TYPES[kind], True
    if status := llama_cpp.llama_model_quantize(str(model).encode(), str(out).encode(), params):
        raise RuntimeError(f"llama.cpp could not convert {model}: {status}")


def scored(path: Path, windows: np.ndarray, out: Path) -> None:
    count, size = windows.shape
    model = llama_cpp.llama_model_load_from_file(str(path).encode(), llama_cpp.llama_model_default_params())
    params = llama_cpp.llama_context_default_params()
    params.n_ctx = params.n_batch = params.n_ubatch = size
    context = llama_cpp.llama_init_from_model(model, params)
    if not context:
        raise RuntimeError(f"llama.cpp could not load {path}")
    vocabulary = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))
    logits = np.lib.format.open_memmap(out, "w+", np.float32, (count, size, vocabulary))
    batch = llama_cpp.llama_batch_init(size, 0, 1)
    for window, tokens in enumerate(windows):
        batch.n_tokens = size
        for place, token in enumerate(tokens):
            batch.token[place], batch.pos[place], batch.n_seq_id[place] = int(token), place, 1
            batch.seq_id[place][0], batch.logits[place] = 0, True
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(context), True)
        if status := llama_cpp.llama_decode(context, batch):
            raise RuntimeError(f"llama_decode says {status}")
        logits[window] = np.ctypeslib.as_array(llama_cpp.llama_get_logits(context), (size, vocabulary))
    logits.flush()


if __name__ == "__main__":
    given, how, target = sys.argv[1:]
    if how in TYPES:
        converted(Path(given), how, Path(target))
    else:
        scored(Path(given), np.load(how), Path(target))
