"""Answer a file of prompts and write the answers beside them: python examples/offline_batch.py [PROMPTS.jsonl [ANSWERS.jsonl]]

Each line of the input is {"prompt": ...} or {"messages": [...]}; without a file, three lines of our own are answered. Each line
of the output is its input with the answer. All lines are given to the engine at once: it fills its batch by itself, and the
answers come back in the order of the lines. For OpenAI's batch format, see `vnext batch`.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

from vnext import LLM, SamplingParams

LINES = (
    {"prompt": "The module"},
    {"messages": [{"role": "user", "content": "What is Python?"}]},
    {"prompt": "An exception is raised when"},
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("prompts", nargs="?", type=Path)
    parser.add_argument("answers", nargs="?", type=Path, default=Path("answers.jsonl"))
    parser.add_argument("--model", default="", help="a folder or hub id (default: the demo model)")
    parser.add_argument("--max-tokens", type=int, default=40)
    options = parser.parse_args()
    lines = LINES if options.prompts is None else [json.loads(line) for line in options.prompts.read_text().splitlines() if line]
    with LLM(options.model, log="off") as llm:
        tokenizer = llm.get_tokenizer()
        prompts = [
            tokenizer.apply_chat_template(line["messages"], add_generation_prompt=True) if "messages" in line else line["prompt"]
            for line in lines
        ]
        began_s = time.monotonic()
        found = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=options.max_tokens))
        seconds = time.monotonic() - began_s
    with options.answers.open("w") as file:
        for line, each in zip(lines, found):
            answer = {"answer": each.outputs[0].text, "finish_reason": each.outputs[0].finish_reason}
            file.write(json.dumps({**line, **answer}) + "\n")
    tokens = sum(each.metrics.num_generation_tokens for each in found)
    print(f"{len(found)} answers, {tokens} tokens in {seconds:.1f} s: {options.answers}", file=sys.stderr)


if __name__ == "__main__":
    main()
