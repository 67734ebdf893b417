"""An agent's talk of ten turns with a model that has recurrent layers: `python -m perf.agent_talk [--model FOLDER] --json RECORD`.

Each turn's prompt is the last one, its answer, and the result of a tool. A turn computes what is new and, of what was said before, what
no snapshot covers: that part is the figure, beside the seconds to the first token, the state pages that the engine has, and how many of
them are snapshots. Between two turns others pass by with prompts of their own, as many as `--others` says. Without a folder the model
has the shape of Qwen3.5-0.8B and random weights.
"""

from __future__ import annotations

import json
import re
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from perf.record import machine, parser_of, record_of, write_record
from perf.recording import Server
from scripts.random_model import filled_tokenizer

TURNS = 10
TOOLS, RESULT, ANSWER = 3000, 400, 100
"""Tokens of the instructions and tools, of a tool's result, and of an answer."""
OTHER = 700
BOUND = 1024
"""Tokens of what was said before that a turn may compute again."""
WORDS = 3000
GAUGES = ("vnext_state_pages", "vnext_state_pages_held", "vnext_state_snapshots", "vnext_prefix_cache_lost_tokens_total")
QWEN = {
    "architectures": ["Qwen3_5ForCausalLM"], "model_type": "qwen3_5_text", "attention_bias": False, "attn_output_gate": True,
    "dtype": "bfloat16", "full_attention_interval": 4, "head_dim": 256, "hidden_act": "silu", "hidden_size": 1024,
    "intermediate_size": 3584, "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_num_key_heads": 16,
    "linear_num_value_heads": 16, "linear_value_head_dim": 128, "max_position_embeddings": 32768, "num_attention_heads": 8,
    "num_hidden_layers": 24, "num_key_value_heads": 2, "rms_norm_eps": 1e-06, "tie_word_embeddings": True, "vocab_size": 248320,
    "rope_parameters": {"partial_rotary_factor": 0.25, "rope_theta": 10000000, "rope_type": "default"},
}  # fmt: skip


def write_shape(folder: Path) -> Path:
    """What a server needs of a model whose weights it draws."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(QWEN))
    (folder / "tokenizer.json").write_text(json.dumps(filled_tokenizer(WORDS + 200)))
    return folder


def ask(server: Server, prompt: list[int]) -> tuple[dict[str, Any], list[int]]:
    """Seconds to the first token and tokens that were hits; and the answer."""
    body = {
        "prompt": prompt, "max_tokens": ANSWER, "temperature": 0, "ignore_eos": True, "stream": True, "return_token_ids": True,
        "stream_options": {"include_usage": True},
    }  # fmt: skip
    began_s, first_s, hits, answer = time.perf_counter(), 0.0, 0, list[int]()
    for chunk in server.client.stream("/v1/completions", body):
        first_s = first_s or chunk.at_s - began_s
        answer += chunk.token_ids
        if chunk.usage:
            hits = chunk.usage.prompt_tokens_details.cached_tokens
    assert len(answer) == ANSWER, answer
    return {"first_token_s": round(first_s, 3), "hits": hits}, answer


def gauges(server: Server) -> dict[str, int]:
    """The state pages, by their names in /metrics."""
    text = server.client.read("/metrics").decode()
    found = {name: re.search(rf"^{name}(?:{{.*}})? (\S+)", text, re.MULTILINE) for name in GAUGES}
    return {name: int(float(match[1])) for name, match in found.items() if match}


def talk(server: Server, others: int) -> list[dict[str, Any]]:
    """What each turn took."""
    rng = np.random.default_rng(1)

    def tokens(count: int) -> list[int]:
        return rng.integers(10, WORDS, count).tolist()

    history, turns, new = list[int](), [], TOOLS
    for turn in range(TURNS):
        history += tokens(new)
        took, answer = ask(server, history)
        known = len(history) - new
        again = max(known - took["hits"], 0)
        turns.append({"turn": turn, "prompt": len(history), "new": new, "again": again, **took, **gauges(server)})
        history, new = [*history, *answer], RESULT
        for _ in range(others):
            ask(server, tokens(OTHER))
    return turns


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--model", default="", help="a folder (default: Qwen3.5-0.8B's shape with random weights)")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--others", type=int, default=0, help="prompts of others between two turns")
    options = parser.parse_args()
    before = machine()
    with tempfile.TemporaryDirectory() as folder:
        served = (options.model,) if options.model else (str(write_shape(Path(folder) / "qwen")), "--load-format", "dummy")
        with Server("off", folder, options.threads, options=(*served, "--max-model-len", "8192")) as server:
            turns = talk(server, options.others)
    worst = max(each["again"] for each in turns)
    summary = {"again_max": worst, "bound": BOUND, "holds": worst <= BOUND, "snapshots_max": max(each["vnext_state_snapshots"] for each in turns)}
    print(json.dumps(summary))
    if options.json:
        command = f"python -m perf.agent_talk --threads {options.threads} --others {options.others}"
        write_record(options.json, record_of(command, before, {**summary, "others": options.others, "turns": turns}))


if __name__ == "__main__":
    main()
