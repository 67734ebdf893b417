"""Example: the curl line that gets an answer from a server. The server prints it at start and on the page at /."""

from __future__ import annotations

import json
import shlex

KEY_VARIABLE = "VNEXT_API_KEY"
EXAMPLE_WORDS = "What is Python?"


def curl_line(url: str, *, chat: bool, has_key: bool) -> str:
    """A command for the reader's shell. It names the key's variable and never shows the key."""
    key = f' -H "Authorization: Bearer ${KEY_VARIABLE}"' if has_key else ""
    body = {"messages": [{"role": "user", "content": EXAMPLE_WORDS}]} if chat else {"prompt": EXAMPLE_WORDS}
    path = "chat/completions" if chat else "completions"
    body = json.dumps(body | {"max_tokens": 60, "temperature": 0})
    return f"curl -s {shlex.quote(url)}/v1/{path} -H 'Content-Type: application/json'{key} -d {shlex.quote(body)}"
