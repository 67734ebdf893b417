"""lm_eval: compare what it computes over a vnext server with its own `hf` backend: `scripts/check_lm_eval.py [--json RECORD]`.

Owns the two tasks, one of loglikelihoods and one of rolling loglikelihoods, over texts of a seeded generator; nothing comes
from the network. Both backends compute the same checkpoint in float32. Every request's value is compared, and whether the
continuation is the greedy one. lm_eval runs in an environment of its own, given by --python:

    python -m venv lm-eval && lm-eval/bin/python -m pip install torch==2.13.0 transformers==5.23.0 'lm_eval[api]==0.4.13'
    python scripts/check_lm_eval.py --python lm-eval/bin/python
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import msgspec

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "e2e")]

from serving import serving  # noqa: E402

from vnext import LLM, SamplingParams  # noqa: E402
from vnext.base.version import __version__  # noqa: E402
from vnext.commands.machine import machine  # noqa: E402

WORDS = "the module returns a list of names if it is not empty and prints each line to file def class import len".split()
LENGTH_MAX = 128
TOLERANCE = 2e-3
"""Of a sum over a document. Both compute in float32 and add in different orders."""

CHOICES = """\
task: vnext_choices
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: choices
doc_to_target: answer
target_delimiter: ""
metric_list: [{{metric: acc}}]
"""
ROLLING = """\
task: vnext_rolling
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{{{text}}}}"
metric_list: [{{metric: word_perplexity}}, {{metric: bits_per_byte}}]
"""


def write_tasks(folder: Path, model: str, seed: int, count: int) -> None:
    """The task files and their data: questions with choices of different lengths, of which one is what the model would say, and
    texts of up to several windows."""
    rng = random.Random(seed)

    def text(low: int, high: int) -> str:
        return " ".join(rng.choices(WORDS, k=rng.randint(low, high)))

    asked = [text(1, 16) for _ in range(count)]
    with LLM(model, dtype="float32") as llm:
        said = llm.generate(asked, SamplingParams(temperature=0, max_tokens=3, ignore_eos=True), use_tqdm=False)
    questions = [
        {"question": question, "choices": [each.outputs[0].text, *(f" {text(1, 6)}" for _ in range(2))], "answer": 0}
        for question, each in zip(asked, said)
    ]
    texts = [{"text": text(1, 400)} for _ in range(count)]
    for name, template, rows in (("choices", CHOICES, questions), ("rolling", ROLLING, texts)):
        data = folder / f"{name}.jsonl"
        data.write_text("".join(json.dumps(row) + "\n" for row in rows))
        (folder / f"{name}.yaml").write_text(template.format(data=data))


def results(python: str, folder: Path, name: str, *arguments: str) -> dict[str, list[Any]]:
    """What one backend computes: per task and document, the values of its requests."""
    out = folder / name
    command = [python, "-m", "lm_eval", "--include_path", str(folder), "--tasks", "vnext_choices,vnext_rolling"]
    command += ["--output_path", str(out), "--log_samples", *arguments]
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(folder / "hf"), "CUDA_VISIBLE_DEVICES": ""}
    ran = subprocess.run(command, capture_output=True, text=True, timeout=900, env={**os.environ, **offline})
    if ran.returncode:
        raise SystemExit(f"lm_eval failed over {name}: {ran.stderr[-2000:]}")
    found: dict[str, list[Any]] = {}
    for path in sorted(out.rglob("samples_*.jsonl")):
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        task = "rolling" if "rolling" in path.name else "choices"
        found[task] = [row["resps"] for row in sorted(rows, key=lambda row: row["doc_id"])]
    return found


def requests_of(documents: list[Any]) -> list[tuple[float, bool | None]]:
    """Per request, its value, and whether it is greedy. A rolling request has a value only."""
    flat = []
    for responses in documents:
        for response in responses:
            value = response[0] if isinstance(response, list) else response
            pair = value if isinstance(value, list) else [value, None]
            flat.append((float(pair[0]), None if pair[1] is None else str(pair[1]) == "True"))
    return flat


def compared(ours: list[Any], theirs: list[Any]) -> dict[str, Any]:
    mine, other = requests_of(ours), requests_of(theirs)
    if len(mine) != len(other) or not mine:
        raise SystemExit(f"{len(mine)} values over the server and {len(other)} of hf: lm_eval did not run the same requests.")
    differences = [abs(a[0] - b[0]) for a, b in zip(mine, other)]
    return {
        "requests": len(mine),
        "largest_difference": max(differences),
        "largest_value": max(abs(value) for value, _ in other),
        "greedy_differs": sum(a[1] is not b[1] for a, b in zip(mine, other)),
        "greedy": sum(b[1] is True for b in other),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--python", default=sys.executable, help="of the environment that has lm_eval")
    parser.add_argument("--model", type=Path, default=ROOT / "vnext" / "demo_model", help="a checkpoint's folder")
    parser.add_argument("--documents", type=int, default=60, help="of each task")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path, help="where the record is written")
    options = parser.parse_args()
    before = msgspec.to_builtins(machine())
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_tasks(folder, str(options.model), options.seed, options.documents)
        model = str(options.model)
        hf = f"pretrained={model},dtype=float32,max_length={LENGTH_MAX}"
        theirs = results(options.python, folder, "hf", "--model", "hf", "--model_args", hf, "--device", "cpu")
        with serving(folder / "log", "--model", model, "--dtype", "float32", "--served-model-name", model) as server:
            # Its windows have two tokens less than max_length: one that the API generates, and one that precedes a window.
            api = f"model={model},tokenizer={model},base_url={server.url}/v1/completions,max_length={LENGTH_MAX + 2}"
            ours = results(options.python, folder, "local-completions", "--model", "local-completions", "--model_args", api)
    found = {task: compared(ours[task], theirs[task]) for task in ("choices", "rolling")}
    print(json.dumps(found, indent=1))
    record = {
        "command": " ".join(["python", "scripts/check_lm_eval.py", *sys.argv[1:]]),
        "measured_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "vnext": __version__,
        "machine": before,
        "tolerance": TOLERANCE,
        "tasks": found,
    }
    if options.json:
        options.json.write_text(json.dumps(record, indent=1) + "\n")
    return int(any(each["largest_difference"] > TOLERANCE or each["greedy_differs"] for each in found.values()))


if __name__ == "__main__":
    sys.exit(main())
