"""What microbatches gain in a pipeline of two stages: the throughput of 32 requests that decode, and the steps that wait for tokens.

    python -m perf.stages --json FILE [--model FOLDER]

Engines with 1, 2 and 3 microbatches, one core a stage, are asked in turn; the first round warms up. Their answers must be equal.
"""

from __future__ import annotations

import json
import statistics
import time
from contextlib import ExitStack
from typing import Any

from perf.record import parser_of, record_of, write_record
from vnext import LLM, SamplingParams
from vnext.commands.machine import machine

MICROBATCHES = (1, 2, 3)
REQUESTS, TOKENS, STAGES = 32, 64, 2
PARAMS = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True)
PROMPTS = [[5 + (13 * at + 7 * place) % 500 for place in range(16)] for at in range(REQUESTS)]


def main() -> None:
    """Measure and write the record."""
    parser = parser_of(__doc__ or "")
    parser.add_argument("--model", default="", help="folder of the model (default: the demo model)")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    before, seconds, waited = machine(), dict[int, list[float]](), dict[int, float]()
    with ExitStack() as running:
        engines = {count: running.enter_context(engine(options.model, count)) for count in MICROBATCHES}
        for round_ in range(options.rounds + 1):
            answers = set()
            for count, llm in engines.items():
                taken, answer = asked(llm)
                answers.add(answer)
                seconds.setdefault(count, []).extend([taken] if round_ else [])
            assert len(answers) == 1, "microbatches change no token"
        for count, llm in engines.items():
            first = llm.collective_rpc("stage_counts")[-1]
            waited[count] = round(first["waited"] / first["steps"], 3)
    record = record_of("python -m perf.stages", before, measured(seconds) | {"waited_of_steps": waited, "model": options.model or "demo"})
    print(json.dumps({name: record[name] for name in ("tokens_per_s", "of_one_median", "of_one", "waited_of_steps")}, indent=1))
    write_record(options.json, record)


def engine(model: str, microbatches: int) -> LLM:
    return LLM(model, threads=1, log="off", max_model_len=512, pipeline_parallel_size=STAGES, pipeline_microbatches=microbatches)


def asked(llm: LLM) -> tuple[float, tuple[tuple[int, ...], ...]]:
    """The seconds that all requests take, and their tokens."""
    began_s = time.perf_counter()
    outputs = llm.generate(PROMPTS, PARAMS, False)
    return time.perf_counter() - began_s, tuple(tuple(each.outputs[0].token_ids) for each in outputs)


def measured(seconds: dict[int, list[float]]) -> dict[str, Any]:
    """Throughput, and its ratios to one microbatch in the same round."""
    ratios = {count: [one / mine for one, mine in zip(seconds[1], each)] for count, each in seconds.items() if count > 1}
    return {
        "stages": STAGES, "requests": REQUESTS, "tokens_each": TOKENS,
        "tokens_per_s": {count: round(REQUESTS * TOKENS / statistics.median(each), 1) for count, each in seconds.items()},
        "of_one_median": {count: round(statistics.median(each), 3) for count, each in ratios.items()},
        "of_one": {count: [round(ratio, 3) for ratio in each] for count, each in ratios.items()},
    }  # fmt: skip


if __name__ == "__main__":
    main()
