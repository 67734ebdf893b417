"""Anthropic models: the list of models in the shape of Anthropic's API, made of OpenAI's objects."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from vnext.server.http.pages import Pages, page_of

PAGES = Pages(usual=20, most=1000, after="after_id", before="before_id")
SECONDS_MAX = 2**36  # what a year of four digits holds

Model = Mapping[str, Any]


def anthropic_model(model: Model) -> dict[str, Any]:
    """One model; that of another server may lack everything but its id."""
    created, name = model.get("created"), model["id"]
    began = datetime.fromtimestamp(created if isinstance(created, int) and 0 <= created < SECONDS_MAX else 0, UTC)
    described = {"type": "model", "id": name, "display_name": name, "created_at": began.strftime("%Y-%m-%dT%H:%M:%SZ")}
    length = model.get("max_model_len")
    return described | {"max_input_tokens": length, "max_tokens": length}


def anthropic_page(models: Sequence[Model], query: Mapping[str, str]) -> dict[str, Any]:
    """The page that `limit`, `after_id` and `before_id` ask for. Raises InvalidRequest."""
    page, has_more = page_of(models, lambda model: model["id"], query, PAGES)
    ends = {"first_id": page[0]["id"], "last_id": page[-1]["id"]} if page else {"first_id": None, "last_id": None}
    return {"data": [anthropic_model(model) for model in page], "has_more": has_more} | ends
