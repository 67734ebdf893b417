"""Token ids by llama.cpp: `tokenize_llamacpp.py MODEL LINES.json OUT.json`, without a beginning, special tokens as such.

Runs in the environment of the engine llamacpp.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import llama_cpp


def main() -> None:
    """Write the ids of each line."""
    model, lines, out = map(Path, sys.argv[1:])
    params = llama_cpp.llama_model_default_params()
    params.vocab_only = True
    loaded = llama_cpp.llama_model_load_from_file(str(model).encode(), params)
    vocab = llama_cpp.llama_model_get_vocab(loaded)
    ids = (llama_cpp.llama_token * 2**16)()
    found = []
    for line in json.loads(lines.read_text()):
        data = line.encode()
        count = llama_cpp.llama_tokenize(vocab, data, len(data), ids, len(ids), False, True)
        found.append(ids[:count])
    out.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
