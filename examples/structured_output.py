"""Answers that a program can read, whatever the model: python examples/structured_output.py [MODEL]

A grammar holds each token to the form that is asked for, so an answer that ends by itself parses. The demo model knows little:
what it puts into the fields is nonsense of the right types.
"""

from __future__ import annotations

import sys
from typing import Annotated, Literal

import msgspec

from vnext import LLM, SamplingParams


class Ticket(msgspec.Struct, forbid_unknown_fields=True):
    """What is wanted of a customer's words. pydantic's `model_json_schema()` gives a schema as well."""

    kind: Literal["bug", "question", "praise"]
    urgent: bool
    minutes: Annotated[int, msgspec.Meta(ge=1, le=480)]


PROMPTS = ("The program ends with an error when", "How does one import a module?")
FORMS = {
    "a schema": {"json": msgspec.json.schema(Ticket)},
    "a choice": {"choice": ["positive", "negative", "neutral"]},
    "a pattern": {"regex": r"\d{4}-(0[1-9]|1[0-2])"},
}


def main() -> None:
    with LLM(*sys.argv[1:], log="off") as llm:
        for name, form in FORMS.items():
            params = SamplingParams(temperature=0.8, seed=1, max_tokens=100, structured_outputs=form)
            for answer in llm.generate(PROMPTS, params, use_tqdm=False):
                text = answer.outputs[0].text
                print(f"{name}: {msgspec.json.decode(text, type=Ticket) if name == 'a schema' else text}")


if __name__ == "__main__":
    main()
