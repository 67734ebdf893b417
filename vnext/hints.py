"""Hints: what to do about an option that does not exist, mostly one that another engine has. Knows words only."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from types import MappingProxyType

ELSEWHERE: Mapping[str, str] = MappingProxyType(
    {
        "--model": "name the model without it, as in `vnext serve MODEL`",
        "--enable-auto-tool-choice": "tool calls need no option, the model's chat template says how they are written",
        "--tool-call-parser": "tool calls need no option, the model's chat template says how they are written",
        "--reasoning-parser": "what a model thinks is part of its answer's text",
        "--trust-remote-code": "no code of a checkpoint is ever run",
        "--kv-cache-dtype": "the cache has the model's number type, see --dtype",
        "--swap-space": "a preempted request is computed again, nothing is swapped",
        "--cpu-offload-gb": "weights stay where they are computed with",
        "--pipeline-parallel-size": "ranks share layers, see --tensor-parallel-size",
        "--data-parallel-size": "start several servers, each on its own port",
        "--disable-log-requests": "requests are written from --log-level info on",
        "--enable-lora": "adapters are not served: merge this one into the weights",
        "--load-format": "weights are read from safetensors",
        "--tokenizer": "the tokenizer is the model folder's own",
        "--tokenizer-mode": "the tokenizer is the model folder's own",
        "--revision": "give the folder of the revision that you mean",
        "--download-dir": "the hub's cache is used, HF_HOME says where it is",
        "--hf-token": "the hub's own login is used, or HF_TOKEN",
        "--distributed-executor-backend": "see --executor",
        "--uvicorn-log-level": "see --log-level",
        "--disable-log-stats": "nothing is printed about them, /metrics has them",
        "--enable-log-requests": "requests are written from --log-level info on",
        "--max-logprobs": "a request may ask for 20",
        "--override-generation-config": "write it into the model folder's generation_config.json",
        "--chat-template-content-format": "texts and lists of parts are both understood",
        "--speculative-config": "no smaller model drafts answers",
        "--structured-outputs-config": "there is no structured output",
        "--ssl-keyfile": "let a proxy in front of the server speak TLS",
        "--ssl-certfile": "let a proxy in front of the server speak TLS",
        "--root-path": "let a proxy in front of the server change paths",
        "--allowed-origins": "let a proxy in front of the server answer pages from elsewhere",
        "-m": "name the model without it, as in `vnext serve MODEL`",
        "-hf": "name the model without it, as in `vnext serve MODEL`",
        "-pp": "ranks share layers, see --tensor-parallel-size",
        "-dp": "start several servers, each on its own port",
        "-q": "see --quantization",
        "-c": "see --max-model-len",
        "--ctx-size": "see --max-model-len",
        "-b": "see --max-num-batched-tokens",
        "--base-url": "see --url",
        "-np": "see --max-num-seqs",
        "--parallel": "see --max-num-seqs",
        "-ngl": "a model is computed in one place, see --device",
        "--n-gpu-layers": "a model is computed in one place, see --device",
        "--flash-attn": "attention is chosen by the machine, `vnext doctor` says which",
        "--jinja": "the model's chat template is always used",
    }
)
"""Options that users of vLLM and llama.cpp know, and what is instead of each."""


def unknown_option(given: str, known: Iterable[str]) -> str:
    """One sentence about an argument that nothing takes."""
    name = given.partition("=")[0]
    if not name.startswith("-"):
        return f"nothing takes {given!r}: one model is served, and options begin with two dashes."
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.75)
    if name not in ELSEWHERE and close:
        return f"there is no option {name}: did you mean {close[0]}?"
    return f"there is no option {name}: {ELSEWHERE.get(name, 'leave it out')}."
