"""The first turn after a restart, from the disk tier and computed: `python -m perf.disk_tier --model FOLDER --json RECORD`.

An engine answers a prompt for each round, writes its blocks and ends. The next engine answers these prompts, whose blocks are on disk,
and as many new ones of the same length, by turns. Times are from the call to the answer's one token. The prompts are random tokens.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from perf.record import parser_of, record_of, write_record
from vnext import LLM, SamplingParams
from vnext.commands.machine import machine

ONE = SamplingParams(max_tokens=1, temperature=0.0)


def prompts(seed: int, count: int, length: int) -> list[list[int]]:
    return np.random.default_rng(seed).integers(10, 1000, (count, length)).tolist()


def first_token(llm: LLM, prompt: list[int]) -> dict[str, Any]:
    """Seconds to it, how many of the prompt's tokens were hit, and the token."""
    began_s = time.perf_counter()
    (found,) = llm.generate([prompt], ONE, use_tqdm=False)
    return {
        "seconds": round(time.perf_counter() - began_s, 4), "hit": found.num_cached_tokens, "token": found.outputs[0].token_ids[0],
    }  # fmt: skip


def wait_until_written(folder: Path, blocks: int) -> None:
    while sum(len(path.name) == 32 for path in folder.rglob("*")) < blocks:
        time.sleep(0.1)


def main() -> None:
    options = parser_of(__doc__)
    options.add_argument("--model", default="", help="a folder or hub id (default: the bundled model)")
    options.add_argument("--tokens", type=int, default=4096)
    options.add_argument("--rounds", type=int, default=3)
    chosen = options.parse_args()
    before, known, new = machine(), *(prompts(seed, chosen.rounds, chosen.tokens) for seed in (1, 2))
    with tempfile.TemporaryDirectory() as folder:
        length = chosen.tokens + 16
        settings = {
            "max_model_len": length, "hf_overrides": {"max_position_embeddings": length}, "kv_disk_dir": folder, "threads": 1,
            "log": "off", "num_gpu_blocks_override": (2 * chosen.rounds + 1) * length // 16,
        }  # fmt: skip
        with LLM(chosen.model, **settings) as llm:
            answers = [first_token(llm, prompt) for prompt in known]
            wait_until_written(Path(folder), chosen.rounds * (chosen.tokens // 16))
        with LLM(chosen.model, **settings) as llm:
            rounds = [{"disk": first_token(llm, old), "computed": first_token(llm, fresh)} for old, fresh in zip(known, new)]
    assert [each["disk"]["token"] for each in rounds] == [each["token"] for each in answers], "a block has changed an answer"
    share = round(statistics.median(each["disk"]["seconds"] / each["computed"]["seconds"] for each in rounds), 4)
    found = {"rounds": rounds, "disk_over_computed": share}
    print(found)
    model = {"model": Path(chosen.model).name or "demo", "tokens": chosen.tokens}
    write_record(chosen.json, record_of("python -m perf.disk_tier", before, model | found))


if __name__ == "__main__":
    main()
