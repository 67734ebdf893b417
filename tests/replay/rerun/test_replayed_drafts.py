"""A log of an engine with drafts and with answers that keep to a schema: every command that runs or decides again gives it again."""

from __future__ import annotations

from pathlib import Path

import pytest
from engine_here import engines_here
from saved_adapters import DEMO

from vnext.api.llm import LLM
from vnext.kernels.table import chosen_operations, substituted
from vnext.replay.execution.recorded import Selection, Walk
from vnext.replay.rerun.tokens import samples_of
from vnext.runtime.protocol.sampling_params import SamplingParams, StructuredOutputsParams

SCHEMA = {
    "type": "object", "properties": {"name": {"type": "string", "maxLength": 6}, "colour": {"enum": ["red", "green"]}},
    "required": ["name", "colour"], "additionalProperties": False,
}  # fmt: skip
TEXT = (Path(__file__).parents[3] / "vnext" / "state" / "windows.py").read_text()[600:1100]


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Requests that repeat their prompts, and two of three that answer by the schema."""
    selection = StructuredOutputsParams(json=SCHEMA)
    params = [
        SamplingParams(temperature=0.8 * (at % 2), seed=at, max_tokens=24, structured_outputs=selection if at % 3 else None)
        for at in range(12)
    ]
    prompts = [TEXT[17 * at :][:160] + TEXT[17 * at :][:50] for at in range(12)]
    with engines_here(), LLM(
        str(DEMO), executor="inproc", threads=1, log="full", log_dir=str(tmp_path_factory.mktemp("log")), dtype="float32",
        num_blocks_override=40, max_model_len=256, max_num_batched_tokens=64, max_num_seqs=4, block_size=8, digest_interval=3,
        speculative_config={"num_speculative_tokens": 4, "row_cost": 0},
    ) as llm:  # fmt: skip
        llm.generate(prompts, params, False)
    return Path(llm.log_dir)


def kept(log: Path) -> list[int]:
    """How many drafts each step kept."""
    return [sum(map(len, step.drafts.values())) for step in Walk(log, Selection()).steps()]


@pytest.mark.parametrize("command", [
    ("verify", "--laws"), ("verify", "--grammar"), ("exec",), ("exec", "--solo"), ("exec", "--steps", "20:50"), ("bisect",),
    ("bisect", "--kernels", "torch", "--steps", "10:40"), ("bisect", "--tp", "2", "--steps", "10:30"),
], ids=" ".join)  # fmt: skip
def test_it_comes_out_again(log, answer, command):
    code, found = answer(command[0], log, *command[1:])
    assert (code, found["same"]) == (0, True) and sum(kept(log)) > 10


def test_what_if_gives_its_events_again(log, answer):
    code, found = answer("what-if", log, "--set", "max_num_seqs=2")
    assert (code, found["reproduced"]) == (0, found["events"]) and found["unchanged"]["steps"] < found["runs"][0]["steps"]


def test_a_fault_behind_a_kept_draft_is_named(log, answer):
    """The logits of a step's last sample are another in the first step that keeps several drafts."""
    step = next(step for step in Walk(log, Selection()).steps() if sum(map(len, step.drafts.values())) > 1)
    samples, served = samples_of(step.state), chosen_operations("cpu")

    def wrong(hidden, weight):
        result = served.logits(hidden, weight)
        if len(hidden) == len(samples):
            result[-1, 0] += 1.0
        return result

    with substituted(served._replace(logits=wrong)):
        code, found = answer("bisect", log, "--steps", f"{step.step}:")
    named = found["found"]
    assert (code, named["step"], named["operation"]) == (1, step.step, "logits")
    assert named["rows"] == [{"row": len(samples) - 1, "request": samples[-1].request, "position": samples[-1].position - 1}]
