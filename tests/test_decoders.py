"""A type that threads decode has its decoder from import on.

msgspec gathers what it knows of a struct when the first decoder of it is made, and shows it to other threads before it is whole:
two threads that decode a struct of structs for the first time at once end the process (msgspec 0.22, read at a null pointer).
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
ONE_THREAD = {
    "commands": "a command's own thread", "gateway": "the event loop", "ray": "a process's start", "runtime/engine": "the core's thread",
    "runtime/hosts/handover/tickets.py": "the core's thread", "runtime/rank": "a process's start", "server/__main__.py": "its start",
    "runtime/transport/collectives": "a process's start", "server/batches/store.py": "the event loop",
    "server/responses/store.py": "the event loop", "server/views/responses.py": "the event loop",
}  # fmt: skip
PLAIN = {"dict", "list", "tuple", "str", "int", "float", "object", "Any", "msgspec", "Raw"}


def decoded_anew(text: str) -> Iterator[int]:
    """Lines that decode to a struct without a decoder of their module."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("msgspec.json.decode", "msgspec.msgpack.decode"):
            kinds = [word.value for word in node.keywords if word.arg == "type"]
            names = {each.id for kind in kinds for each in ast.walk(kind) if isinstance(each, ast.Name)}
            if names - PLAIN:
                yield node.lineno


def test_threads_decode_by_decoders_made_at_import() -> None:
    found = [
        f"{path}:{line}"
        for path in sorted((ROOT / "vnext").rglob("*.py"))
        if not any(str(path.relative_to(ROOT / "vnext")).startswith(each) for each in ONE_THREAD)
        for line in decoded_anew(path.read_text())
    ]
    assert found == []


def test_the_search_finds_them() -> None:
    text = "msgspec.json.decode(x, type=Head)\nmsgspec.json.decode(x, type=dict[str, msgspec.Raw])\nmsgspec.msgpack.decode(x, type=list[One])"
    assert list(decoded_anew(text)) == [1, 3]
