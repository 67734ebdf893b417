"""What a request's usage says of its drafts, in each API and however the answer comes, adds up to the engine's own count."""

from __future__ import annotations

import json
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from serving import eventually, serving

SPECULATION = {"method": "suffix", "num_speculative_tokens": 4, "row_cost": 0}
TEXT = "one two three four " * 8
BODY: dict[str, Any] = {"model": "demo", "max_tokens": 40, "ignore_eos": True, "temperature": 0}


def usage_of(url: str, route: str, body: dict[str, Any]) -> dict[str, Any]:
    """The last usage of an answer."""
    data = json.dumps(BODY | body).encode()
    request = urllib.request.Request(f"{url}/v1/{route}", data, {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=120) as answer:
        text = answer.read().decode()
    found = [json.loads(line.removeprefix("data: ")) for line in text.splitlines() if line.startswith(("{", "data: {"))]
    usage: dict[str, Any] = [each["usage"] for each in found if each.get("usage")][-1]
    return usage


def test_usage_counts_the_drafts_of_each_request(tmp_path: Path) -> None:
    chat = {"messages": [{"role": "user", "content": TEXT}]}
    streamed = {"stream": True, "stream_options": {"include_usage": True}}
    asked = [
        ("completions", {"prompt": TEXT}), ("completions", {"prompt": TEXT, "n": 2, "temperature": 1.0, "seed": 3}),
        ("completions", {"prompt": TEXT, "logprobs": 1}), ("completions", {"prompt": TEXT} | streamed), ("chat/completions", chat),
        ("chat/completions", chat | streamed), ("chat/completions", chat | {"num_speculative_tokens": 0}),
    ]  # fmt: skip
    arguments = ["--speculative-config", json.dumps(SPECULATION), "--served-model-name", "demo", "--threads", "1"]
    with serving(tmp_path, *arguments) as server, ThreadPoolExecutor(4) as pool:
        usages = [usage for _ in range(2) for usage in pool.map(lambda each: usage_of(server.url, *each), asked)]
        details = [usage.get("completion_tokens_details", {}) for usage in usages]
        accepted, rejected = (sum(each.get(f"{kind}_prediction_tokens", 0) for each in details) for kind in ("accepted", "rejected"))
        assert all(details[7:13]) and not details[6] and not details[13], "the second time, the earlier answers are drafted"
        assert all(each["completion_tokens"] == 40 * (1 + (at % 7 == 1)) for at, each in enumerate(usages)) and accepted > 150
        assert eventually(lambda: server.metric("vnext_spec_decode_num_draft_tokens_total") == accepted + rejected)
        assert server.metric("vnext_spec_decode_num_accepted_tokens_total") >= accepted
