"""Pages: the part of a list that a query asks for, by the ids of the entries around it; models as Anthropic and Ollama list
them."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, NamedTuple, TypeVar

from vnext.runtime.protocol.sampling_params import InvalidRequest

Entry = TypeVar("Entry")
ORDERS = ("asc", "desc")
SECONDS_MAX = 2**36  # what a year of four digits holds
NEVER = "9999-12-31T23:59:59Z"

Model = Mapping[str, Any]


class Pages(NamedTuple):
    """The names of a list's query fields, and how many entries a page has: `usual` where no `limit` is sent, at most `most`."""

    usual: int
    most: int
    after: str = "after"
    before: str = ""


ANTHROPIC_PAGES = Pages(usual=20, most=1000, after="after_id", before="before_id")


def page_of(
    entries: Sequence[Entry], id_of: Callable[[Entry], str], query: Mapping[str, str], pages: Pages
) -> tuple[list[Entry], bool]:
    """The entries that the query asks for, and whether there are more in its direction. Raises InvalidRequest."""
    limit = _limit(query, pages)
    after, before = (query.get(name, "") if name else "" for name in (pages.after, pages.before))
    ids = [id_of(entry) for entry in entries] if after or before else []
    first = _place(ids, after, pages.after) + 1 if after else 0
    last = _place(ids, before, pages.before) if before else len(entries)
    if before and not after:
        return list(entries[max(0, last - limit) : last]), last > limit
    return list(entries[first:last][:limit]), last - first > limit


def ordered(newest_first: Sequence[Entry], query: Mapping[str, str]) -> list[Entry]:
    """The entries in the `order` that the query asks for, the newest first without one. Raises InvalidRequest."""
    order = query.get("order") or "desc"
    if order not in ORDERS:
        raise InvalidRequest(f"order is {order[:60]!r}: it must be 'asc' or 'desc'.", "order")
    return list(newest_first) if order == "desc" else list(newest_first)[::-1]


def _limit(query: Mapping[str, str], pages: Pages) -> int:
    given = query.get("limit") or str(pages.usual)
    if not (given.isascii() and given.isdecimal()) or not 1 <= int(given[:9]) <= pages.most:
        raise InvalidRequest(f"limit is {given[:60]!r}: it must lie between 1 and {pages.most}.", "limit")
    return int(given[:9])


def _place(ids: Sequence[str], id_: str, name: str) -> int:
    if id_ not in ids:
        raise InvalidRequest(f"{name} is {id_[:60]!r}: the list has no such entry.", name)
    return ids.index(id_)


def anthropic_model(model: Model) -> dict[str, object]:
    """One model; that of another server may lack everything but its id."""
    name, length = model["id"], model.get("max_model_len")
    described = {"type": "model", "id": name, "display_name": name, "created_at": _born(model)}
    return described | {"max_input_tokens": length, "max_tokens": length}


def _born(model: Model) -> str:
    created = model.get("created")
    began = datetime.fromtimestamp(created if isinstance(created, int) and 0 <= created < SECONDS_MAX else 0, UTC)
    return began.strftime("%Y-%m-%dT%H:%M:%SZ")


def anthropic_page(models: Sequence[Model], query: Mapping[str, str]) -> dict[str, object]:
    """The page that `limit`, `after_id` and `before_id` ask for. Raises InvalidRequest."""
    page, has_more = page_of(models, lambda model: model["id"], query, ANTHROPIC_PAGES)
    ends = {"first_id": page[0]["id"], "last_id": page[-1]["id"]} if page else {"first_id": None, "last_id": None}
    return {"data": [anthropic_model(model) for model in page], "has_more": has_more} | ends


def ollama_model(model: Model, fingerprint: str = "", size: int = 0, level: str = "") -> dict[str, object]:
    """One model. `fingerprint`: of its system, "" where none is known. `size`: bytes. `level`: of its quantisation."""
    name = model["id"]
    return {
        "name": name, "model": name, "digest": hashlib.sha256(f"{name} {fingerprint}".encode()).hexdigest(),
        "modified_at": _born(model), "expires_at": NEVER, "size": size, "size_vram": 0, "details": ollama_details(level),
    }  # fmt: skip


def ollama_details(level: str) -> dict[str, object]:
    return {
        "parent_model": "", "format": "vnext", "family": "vnext", "families": ["vnext"], "parameter_size": "",
        "quantization_level": level,
    }  # fmt: skip
