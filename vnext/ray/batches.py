"""A stage for Ray Data: answers to the prompts of a dataset, one engine for each actor of the stage.

    dataset.map_batches(Answers, fn_constructor_kwargs={"model": "folder"}, concurrency=2, num_cpus=4, batch_size=64)

Owns the engine of one actor, which ends with it. Imports no Ray: Ray Data takes any class that maps columns to columns.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from vnext.api.llm import LLM
from vnext.runtime.protocol.sampling_params import SamplingParams


class Answers:
    """Adds to each row of a batch the columns `generated_text`, `generated_tokens` (their ids) and `finish_reason`.

    A row has a column `messages` (a conversation, for the chat template), `prompt_token_ids` or `prompt` (a text); the first one
    that is there counts. `sampling_params` are keywords of SamplingParams; a column `sampling_params` has further ones for its row,
    such as a seed. `settings` are those of LLM. Raises what LLM raises, InvalidRequest and ValueError.
    """

    def __init__(self, model: str = "", sampling_params: Mapping[str, Any] | None = None, **settings: Any) -> None:
        self._llm, self._given = LLM(model, **settings), dict(sampling_params or {})

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Answer the rows of one batch: columns, each with one value for each row."""
        column = next((name for name in ("messages", "prompt_token_ids", "prompt") if name in batch), None)
        if column is None:
            raise ValueError(f"the dataset has the columns {', '.join(batch)}: give it prompt, prompt_token_ids or messages")
        asked = [_plain(value) for value in batch[column]]
        own = batch.get("sampling_params", [{}] * len(asked))
        params = [SamplingParams(**self._given, **_own(each)) for each in own]
        ask = self._llm.chat if column == "messages" else self._llm.generate
        answers = [each.outputs[0] for each in ask(asked, params, use_tqdm=False)] if asked else []
        return batch | {
            "generated_text": _column(answer.text for answer in answers),
            "generated_tokens": _column(answer.token_ids for answer in answers),
            "finish_reason": _column(answer.finish_reason for answer in answers),
        }


def _plain(value: Any) -> Any:
    """A value of a column as Python's own: Ray Data makes arrays of lists."""
    if isinstance(value, (np.ndarray, list)):
        return [_plain(each) for each in value]
    return value.item() if isinstance(value, np.generic) else value


def _own(params: Mapping[str, Any]) -> dict[str, Any]:
    """A row's parameters. A column of dicts is a table in Ray Data: what a row does not have is None or NaN there, and where a row
    has none of a kind its whole numbers are floats."""
    plain = {name: _plain(value) for name, value in params.items()}
    whole = {name: int(value) for name, value in plain.items() if isinstance(value, float) and value.is_integer()}
    return {name: value for name, value in (plain | whole).items() if value is not None and value == value}


def _column(values: Any) -> np.ndarray:
    values = list(values)
    column = np.empty(len(values), dtype=object)
    column[:] = values
    return column
