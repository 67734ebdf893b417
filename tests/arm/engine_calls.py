"""A whole engine on the bundled model, at one instruction set: which kernels it names, and tokens, greedy and sampled.

    python engine_calls.py ISA

Needs no torch. test_arm.py compares what two processors print at levels with the same bits.
"""

from __future__ import annotations

import json
import sys

from vnext import LLM, SamplingParams

PROMPTS = ["import", "def main(", "The standard library", "Return the number of"]
SAMPLED = [
    SamplingParams(temperature=0, max_tokens=24, ignore_eos=True),
    SamplingParams(temperature=0.9, top_p=0.95, seed=7, max_tokens=24, ignore_eos=True),
]


def main(isa: str) -> None:
    with LLM(isa=isa, dtype="float32", threads=1, log="off") as llm:
        found = [llm.generate(PROMPTS, params, use_tqdm=False) for params in SAMPLED]
        tokens = [[answer.outputs[0].token_ids for answer in answers] for answers in found]
        print(json.dumps({"kernels": llm.ready.environment["kernels"], "tokens": tokens}))


if __name__ == "__main__":
    main(sys.argv[1])
