"""Of a corpus of schemas, each is refused with its reason or keeps every answer to itself. scripts/structured_corpus.py has the
model write more of them."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import jsonschema
import pytest
from corpus import corpus
from judging import Judge
from random_answers import RandomWriter

import vnext
from vnext.runtime.protocol.sampling_params import InvalidRequest, StructuredOutputsParams
from vnext.text.structured.asked import asked_of
from vnext.text.structured.grammar import grammar_of
from vnext.text.tokenizer import Tokenizer

COUNT = 400


def test_no_answer_is_rejected(capsys: pytest.CaptureFixture[str]) -> None:
    tokenizer = Tokenizer.load(Path(vnext.__file__).parent / "demo_model")
    writer = RandomWriter(tokenizer)
    refusals: Counter[str] = Counter()
    counts: Counter[str] = Counter()
    for family, schema in corpus(COUNT, seed=2):
        try:
            judge = Judge(schema)
            grammar = grammar_of(asked_of(StructuredOutputsParams(json=schema)), tokenizer)
        except jsonschema.SchemaError:
            continue
        except InvalidRequest as error:
            refusals[error.message.partition(": ")[2]] += 1
            continue
        answer = writer.answer(grammar)
        counts["whole" if answer is not None else "cut off"] += 1
        assert answer is None or judge.error(answer) == "", (family, json.dumps(schema), answer)
    with capsys.disabled():
        print(
            f"\n{dict(counts)}, {refusals.total()} refused:",
            *(f"  {count} {why}" for why, count in refusals.most_common(5)),
            sep="\n",
        )
    assert counts["whole"] > 0.8 * COUNT and refusals.total() < 0.2 * COUNT
