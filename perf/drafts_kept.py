"""How many drafts a real model keeps: SmolLM2's answers in chats, with each drafter that needs no model of its own.

    python -m perf.drafts_kept --json FILE [--model smollm2]

Drafts cost nothing here (`row_cost` 0), so that their number follows from the texts alone: no time is measured, and runs of one
instruction set give the same figures. Three tasks: a text to be repeated with one change, questions, and JSON by a schema.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from vnext.commands.bench.load.blocking import BlockingClient

ROOT = Path(__file__).resolve().parents[1]
DRAFTERS = {
    "ngram 4": {"method": "ngram", "num_speculative_tokens": 4},
    "suffix 8": {"method": "suffix", "num_speculative_tokens": 8, "suffix_decoding_max_cached_requests": 0},  # questions come twice
}
FREE = {"row_cost": 0, "row_cost_many": 0, "step_cost": 0}
TEMPERATURES, TOKENS = (0.0, 0.8), 120
QUESTIONS = (
    "What is the capital of Germany?", "Give me three tips for learning Python.", "How do plants make food?", "Who was Marie Curie?",
    "Explain what a prime number is.", "Write a short story about a lighthouse.", "How do I boil an egg?", "Name five rivers in Europe.",
)  # fmt: skip
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 20}, "continent": {"enum": ["Asia", "Europe", "Africa", "America"]},
                   "languages": {"type": "array", "items": {"type": "string", "maxLength": 12}, "minItems": 1, "maxItems": 3}},
    "required": ["name", "continent", "languages"], "additionalProperties": False,
}  # fmt: skip
FORM = {"type": "json_schema", "json_schema": {"name": "country", "schema": SCHEMA, "strict": True}}


def tasks() -> dict[str, list[dict[str, Any]]]:
    """The fields of the requests of each task."""
    text = (ROOT / "vnext" / "base" / "spelling.py").read_text().splitlines()
    parts = ["\n".join(text[at : at + 6]) for at in range(0, 14, 2)]
    edits = [f"Repeat this program exactly, with `name` called `word`:\n{part}" for part in parts]
    countries = ("Germany", "Japan", "Kenya", "Brazil", "France", "India")
    forms = [{"response_format": FORM} | message(f"Describe {name} as JSON.") for name in countries]
    return {"edit": [*map(message, edits)], "questions": [*map(message, QUESTIONS)], "schema": forms}


def message(content: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": content}]}


@contextmanager
def served(model: str, drafts: dict[str, Any]) -> Iterator[BlockingClient]:
    """A server of the model that drafts so."""
    command = [sys.executable, "-m", "vnext.commands.cli", "serve", model, "--port", "0", "--log", "off", "--quantization", "none"]
    process = subprocess.Popen([*command, "--speculative-config", json.dumps(drafts | FREE)], stdout=subprocess.PIPE, text=True)
    try:
        line = next(line for line in process.stdout or () if "serving" in line)
        yield BlockingClient(re.findall(r"http://\S+", line)[0])
    finally:
        process.terminate()
        process.wait()


def kept(client: BlockingClient, bodies: list[dict[str, Any]], temperature: float) -> dict[str, Any]:
    """Of the answers together: their tokens and drafts, the share of drafts that were kept, and the tokens a step."""
    tokens = accepted = rejected = 0
    for seed, body in enumerate(bodies):
        body = body | {"temperature": temperature, "seed": seed, "max_tokens": TOKENS}
        usage = client.ask("/v1/chat/completions", body, dict)["usage"]
        details = usage.get("completion_tokens_details", {})
        tokens += usage["completion_tokens"]
        accepted += details.get("accepted_prediction_tokens", 0)
        rejected += details.get("rejected_prediction_tokens", 0)
    return {
        "tokens": tokens, "drafts": accepted + rejected, "kept": round(accepted / max(accepted + rejected, 1), 3),
        "tokens_a_step": round(tokens / (tokens - accepted), 2),
    }  # fmt: skip


def main() -> None:
    """Measure and write the record."""
    options = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    options.add_argument("--json", type=Path, help="file for the record")
    options.add_argument("--model", default="smollm2", help="a name, a folder or a hub id")
    chosen = options.parse_args()
    record: dict[str, Any] = {"command": "python -m perf.drafts_kept", "model": chosen.model, "results": []}
    for drafter, config in DRAFTERS.items():
        with served(chosen.model, config) as client:
            for task, bodies in tasks().items():
                for temperature in TEMPERATURES:
                    found = {"drafter": drafter, "task": task, "temperature": temperature, **kept(client, bodies, temperature)}
                    record["results"].append(found)
                    print(found, flush=True)
    if chosen.json:
        chosen.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
