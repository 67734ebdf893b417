"""Structured corpus: have the model answer by schemas: `python scripts/structured_corpus.py --schemas 1000 --json RECORD`.

Owns the sampling and the counts. The schemas are those of tests/text/structured/corpus.py. Each is refused with its reason, or
gets answers at a temperature of 1.5, and `jsonschema` judges every whole answer. A rejected answer is printed; the exit
status is then 1.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import jsonschema
import msgspec

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "text" / "structured")]

from corpus import corpus  # noqa: E402
from judging import Judge  # noqa: E402

from vnext import LLM, SamplingParams, StructuredOutputsParams  # noqa: E402
from vnext.base.version import __version__  # noqa: E402
from vnext.commands.machine import machine  # noqa: E402
from vnext.runtime.protocol.sampling_params import InvalidRequest  # noqa: E402
from vnext.text.structured.asked import asked_of  # noqa: E402
from vnext.text.structured.grammar import grammar_of  # noqa: E402

PROMPT = "The object is "
ROUND = 100


def kept_schemas(llm: LLM, count: int, refusals: Counter[str]) -> list[tuple[dict[str, Any], Judge]]:
    """The schemas that are kept; `refusals` counts the reasons of the others."""
    kept = []
    for _, schema in corpus(count):
        try:
            judge = Judge(schema)
            grammar_of(asked_of(StructuredOutputsParams(json=schema)), llm.tokenizer)
        except jsonschema.SchemaError:
            refusals["jsonschema takes it for no schema"] += 1
        except InvalidRequest as error:
            refusals[error.message.partition(": ")[2]] += 1
        else:
            kept.append((schema, judge))
    return kept


def params_of(schema: dict[str, Any], answers: int, max_tokens: int, seed: int) -> SamplingParams:
    """Every other schema without whitespace, which takes most of a random answer's tokens."""
    shape = StructuredOutputsParams(json=schema, disable_any_whitespace=seed % 2 == 1)
    return SamplingParams(temperature=1.5, n=answers, seed=seed, max_tokens=max_tokens, structured_outputs=shape)


def judged(llm: LLM, options: argparse.Namespace) -> tuple[Counter[str], Counter[str], list[dict[str, str]]]:
    """Counts of answers by their end, counts of refusals, and what was rejected."""
    ends: Counter[str] = Counter()
    refusals: Counter[str] = Counter()
    rejected = []
    kept = kept_schemas(llm, options.schemas, refusals)
    for start in range(0, len(kept), ROUND):
        some = kept[start : start + ROUND]
        params = [params_of(schema, options.answers, options.max_tokens, start + at) for at, (schema, _) in enumerate(some)]
        for (schema, judge), asked in zip(some, llm.generate([PROMPT] * len(some), params, use_tqdm=False)):
            for answer in asked.outputs:
                ends[answer.finish_reason] += 1
                if answer.finish_reason == "stop" and (error := judge.error(answer.text)):
                    rejected.append({"schema": json.dumps(schema), "answer": answer.text, "error": error})
        print(f"{start + len(some)} of {len(kept)} schemas: {dict(ends)}, {len(rejected)} rejected", flush=True)
    return ends, refusals, rejected


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--schemas", type=int, default=1_000)
    parser.add_argument("--answers", type=int, default=6, help="to each schema")
    parser.add_argument("--max-tokens", type=int, default=200)
    parser.add_argument("--model", default="", help="the demo model if none")
    parser.add_argument("--json", type=Path, help="where the record is written")
    options = parser.parse_args()
    before, started_s = msgspec.to_builtins(machine()), time.monotonic()
    with LLM(options.model) as llm:
        ends, refusals, rejected = judged(llm, options)
    for reason, count in refusals.most_common():
        print(f"{count:5} refused: {reason}")
    for each in rejected:
        print(f"rejected: {each}")
    record = {
        "command": " ".join(["python", "scripts/structured_corpus.py", *sys.argv[1:]]),
        "measured_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "vnext": __version__,
        "machine": before,
        "seconds": round(time.monotonic() - started_s, 1),
        "schemas": options.schemas,
        "refused": dict(refusals.most_common()),
        "answers": dict(ends),
        "rejected": rejected,
    }
    if options.json:
        options.json.write_text(json.dumps(record, indent=1) + "\n")
    return 1 if rejected else 0


if __name__ == "__main__":
    sys.exit(main())
