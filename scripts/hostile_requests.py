"""Hostile requests: valid HTTP requests, each damaged as its seed decides.

Owns the valid bodies of each path and the damage: to values and names within the JSON, to its text, to the headers, and to the
way the bytes are sent. `case(seed)` is a pure function. This module sends nothing; `fuzz_http.py` does.
"""

from __future__ import annotations

import copy
import gzip
import json
import random
import zlib
from collections.abc import Callable
from typing import Any, NamedTuple

TOOL = {"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object", "properties": {}}}}
USER = {"role": "user", "content": "Say a word."}
COMMON = {
    "max_tokens": 2, "temperature": 0.5, "top_p": 0.9, "top_k": 5, "min_p": 0.1, "seed": 7, "n": 1, "stop": ["x"],
    "logit_bias": {"5": 1}, "presence_penalty": 0.5, "frequency_penalty": 0.5, "repetition_penalty": 1.1, "min_tokens": 1,
    "stop_token_ids": [3], "user": "u", "ignore_eos": True, "skip_special_tokens": False, "include_stop_str_in_output": True,
    "priority": 1, "cache_salt": "s", "request_id": "r-1", "return_token_ids": True, "model": None, "best_of": None,
    "guided_json": None, "service_tier": "auto",
}  # fmt: skip
STREAM = {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}
CALL = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}
TALK = [
    {"role": "system", "content": "Be brief."}, USER, {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "content": "done", "tool_call_id": "a"}, {"role": "user", "content": [{"type": "text", "text": "And?"}]},
]  # fmt: skip
SCORED = {"messages": [USER], "logprobs": True, "top_logprobs": 2, "response_format": {"type": "text"}}
ANTHROPIC_TOOL = {"name": "f", "description": "d", "input_schema": {"type": "object", "properties": {}}}
BLOCKS = [
    USER, {"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "f", "input": {}}]},
    {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a", "content": "done"}, {"type": "text", "text": "And?"}]},
]  # fmt: skip
THINKING = {"thinking": {"type": "enabled", "budget_tokens": 1024}, "output_config": {"effort": "high"}}
ITEMS = [
    USER, {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]},
    {"type": "function_call", "call_id": "a", "name": "f", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "a", "output": "done"},
    {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "And?"}]},
]  # fmt: skip
RESPONSE_TOOLS = [{"type": "function"} | TOOL["function"], {"type": "custom", "name": "g", "format": {"type": "text"}}]
RESPONSE_OPTIONS = {
    "text": {"format": {"type": "text"}, "verbosity": "low"}, "reasoning": {"effort": "low", "summary": "auto"}, "top_p": 0.9,
    "include": ["reasoning.encrypted_content"], "metadata": {"a": "b"}, "truncation": "disabled", "parallel_tool_calls": False,
    "previous_response_id": None, "temperature": 0.5, "prompt_cache_key": "k",
}  # fmt: skip
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer", "minimum": 1}, "b": {"enum": ["x", "y"]}}, "required": ["a"]}
JSON_SCHEMA = {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA, "strict": True}}}
TAGGED = {"type": "structural_tag", "structures": [{"begin": "<f>", "schema": SCHEMA, "end": "</f>"}], "triggers": ["<f"]}
LISTS = {"allowed_token_ids": [5, 6, 7], "bad_words": ["a", "once upon"], "logit_bias": {"6": -100}}
FORCED = {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "f"}}, "parallel_tool_calls": False}
REASONED = {"reasoning_effort": "low", "include_reasoning": False, "thinking_token_budget": 1, "enable_thinking": True}
BEAMS = {"use_beam_search": True, "beam_width": 2, "n": 2, "length_penalty": 0.5, "temperature": 0}
ECHOED = {"echo": True, "logprobs": 2, "prompt_logprobs": 1, "truncate_prompt_tokens": 4, "return_tokens_as_token_ids": True}
OLLAMA_OPTIONS = {"num_predict": 2, "temperature": 0.5, "top_k": 5, "seed": 7, "stop": ["x"], "repeat_penalty": 1.1, "mirostat": 0}
OLLAMA_TALK = [
    USER, {"role": "assistant", "thinking": "Hm.", "tool_calls": [{"function": {"name": "f", "arguments": {"a": 1}}}]},
    {"role": "tool", "tool_name": "f", "content": "done", "images": ["eA=="]},
]  # fmt: skip
BATCH_LINE = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "a", "max_tokens": 1}}
BODIES: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", {"prompt": "Once upon", "max_tokens": 2}),
    ("/v1/completions", {"prompt": ["a", "b"], "logprobs": 1, "echo": False} | COMMON),
    ("/v1/completions", {"prompt": [[5, 6], [7]], "add_special_tokens": False, "max_tokens": 1}),
    ("/v1/completions", {"prompt": "Once upon"} | COMMON | STREAM),
    ("/v1/chat/completions", {"messages": [USER], "max_tokens": 2}),
    ("/v1/chat/completions", {"messages": TALK, "max_completion_tokens": 2, "tools": [TOOL], "tool_choice": "auto"}),
    ("/v1/chat/completions", SCORED | COMMON),
    ("/v1/chat/completions", {"messages": [USER], "chat_template_kwargs": {"enable_thinking": False}} | COMMON | STREAM),
    ("/v1/responses", {"input": "Once", "max_output_tokens": 2, "instructions": "a", "store": True, "stream": True}),
    ("/v1/responses", {"input": ITEMS, "max_output_tokens": 2, "tools": RESPONSE_TOOLS, "tool_choice": "auto"} | RESPONSE_OPTIONS),
    ("/v1/messages", {"messages": [USER], "max_tokens": 2, "stop_sequences": ["x"], "top_k": 5, "stream": True}),
    ("/v1/messages", {"messages": BLOCKS, "max_tokens": 2, "tools": [ANTHROPIC_TOOL], "tool_choice": {"type": "auto"}} | THINKING),
    ("/v1/messages/count_tokens", {"messages": BLOCKS, "system": [{"type": "text", "text": "Be brief."}]}),
    ("/v1/completions", {"prompt": "Once upon", "max_tokens": 4, "structured_outputs": {"json": SCHEMA}}),
    ("/v1/completions", {"prompt": "Once", "max_tokens": 4, "structured_outputs": {"choice": ["yes", "no"]}, "stream": True}),
    ("/v1/completions", {"prompt": "Once", "max_tokens": 4, "guided_regex": "[a-z]{2,5}( x|y)?", "min_tokens": 1}),
    ("/v1/completions", {"prompt": "Once", "max_tokens": 4, "guided_grammar": 'root ::= "a" root | "b"'}),
    ("/v1/completions", {"prompt": "Once upon", "max_tokens": 3} | LISTS),
    ("/v1/completions", {"prompt": "Once upon", "max_tokens": 3} | BEAMS),
    ("/v1/completions", {"prompt": "Once upon a time", "max_tokens": 0} | ECHOED),
    ("/v1/chat/completions", {"messages": [USER], "max_tokens": 6, "response_format": TAGGED}),
    ("/v1/chat/completions", {"messages": [USER], "max_tokens": 6, "stream": True} | JSON_SCHEMA | REASONED),
    ("/v1/chat/completions", {"messages": [USER], "max_tokens": 6, "prompt_logprobs": 1} | FORCED),
    ("/v1/chat/completions", {"messages": TALK, "max_tokens": 4, "tools": [TOOL], "tool_choice": "required", "stream": True}),
    ("/v1/embeddings", {"input": ["a", "b"], "encoding_format": "base64", "dimensions": 8, "normalize": True, "pooling": "mean"}),
    ("/v1/embeddings", {"input": [[5, 6], [7]], "add_special_tokens": False}),
    ("/rerank", {"query": "a", "documents": ["b", {"text": "c"}], "top_n": 1, "return_documents": True}),
    ("/score", {"text_1": "a", "text_2": ["b", "c"], "pooling": "cls"}),
    ("/v1/batches", {"input_file_id": "file-1", "endpoint": "/v1/completions", "completion_window": "24h", "metadata": {"a": "b"}}),
    ("/v1/files", {"purpose": "batch", "file": [BATCH_LINE]}),
    ("/api/chat", {"messages": OLLAMA_TALK, "tools": [TOOL], "think": True, "format": SCHEMA, "options": OLLAMA_OPTIONS}),
    ("/api/generate", {"prompt": "Once", "system": "a", "images": ["eA=="], "stream": False, "options": OLLAMA_OPTIONS}),
    ("/api/generate", {"prompt": "Once", "suffix": "end", "raw": True, "keep_alive": "5m", "options": OLLAMA_OPTIONS}),
    ("/api/embed", {"input": ["a", "b"], "dimensions": 8, "truncate": True, "keep_alive": 1.5}),
    ("/api/embeddings", {"prompt": "a", "keep_alive": "5m"}),
    ("/api/show", {"model": "a:latest", "name": "b"}),
    ("/v1/responses/input_tokens", {"input": ITEMS, "tools": RESPONSE_TOOLS, "instructions": "a"}),
    ("/tokenize", {"prompt": "Once upon", "add_special_tokens": True, "return_token_strs": True}),
    ("/tokenize", {"messages": [USER], "tools": [TOOL], "add_generation_prompt": True}),
    ("/detokenize", {"tokens": [5, 6, 7]}),
]
PLAIN_PATHS = (
    "/", "/docs", "/health", "/ping", "/version", "/metrics", "/v1/models", "/v1/models/%2e%2e", "/log", "/log/0", "/nowhere",
    "/load", "/server_info", "/openapi.json", "/v1/files", "/v1/files/x", "/v1/files/file-1/content", "/v1/batches",
    "/v1/batches/x", "/v1/batches/x/cancel", "/v1/responses/x", "/v1/responses/x/input_items",
)  # fmt: skip
ODD_NAMES = {"role", "content", "provider", "tempreature", "__class__", "", "\ud83d", "a" * 300}
NAMES = sorted({name for _, body in BODIES for name in body} | ODD_NAMES)
WEIRD: list[Any] = [
    None, True, False, 0, -1, 1, 2, 0.5, -0.0, 1e308, 1e-320, 2**31, 2**63, -(2**63), 2**64, 10**40, "", " ", "x", "\x00",
    "\ud800", "😀é\u202e", "a" * 5000, "null", "NaN", "-1", "none", "auto", "required", [], {}, [[]], [{}], {"": None}, [None],
    [1, "a"], [5] * 300, {"type": "text"}, {"type": "json_object"}, {"role": "user", "content": "x"}, ["a"] * 40,
    {"a": {"b": {"c": [1]}}},
]  # fmt: skip
LITERALS = (
    "NaN", "Infinity", "-Infinity", "1e999", "01", "0x10", "'a'", "undefined", '"\\ud800"', '"\\u0000"', '"\\x41"', "-", "1" * 400,
    "/**/1",
)  # fmt: skip
BOUNDARY = "x0x"
CONTENT_TYPES = (
    "application/json", "Application/JSON; charset=utf-8", "application/json; charset=utf-99", "text/plain", "", "a/b; =",
    "multipart/form-data",
)  # fmt: skip
HEADERS = {
    "X-Request-Id": ("abc-1", "", "a b", "é".encode().decode("latin-1"), "x" * 4000, "../../x", "%00"),
    "Authorization": ("Bearer x", "bearer", "Basic eDp5", "\xff\xfe"),
    "Origin": ("http://evil.example", "null", "", "http://[", "http://localhost", "http://caf\xdd"),
    "Host": ("localhost", "evil.example", "[::1", "a:b:c", "caf\xdd"),
    "Accept-Encoding": ("gzip", "br;q=2"),
    "Expect": ("100-continue", "the unexpected"),
    "Upgrade": ("websocket", "h2c"),
    "Connection": ("close", "keep-alive, upgrade"),
    "Content-Encoding": ("identity", "gzip", "deflate", "br", "zstd", "gzip, gzip", "\x80"),
    "Sec-Fetch-Site": ("cross-site", "same-origin"),
    "X" * 300: ("y",),
}  # fmt: skip


class Case(NamedTuple):
    """One request. `pieces`: its bytes, in the pieces that are sent. `leave`: "" reads the answer, "early" closes before it,
    "mid" closes in the middle of it. `is_http`: the request is still valid HTTP, so the server must answer it itself."""

    seed: int
    pieces: list[bytes]
    leave: str
    is_http: bool

    @property
    def data(self) -> bytes:
        return b"".join(self.pieces)


def case(seed: int) -> Case:
    """Return the request of a seed."""
    rng = random.Random(seed)
    if rng.random() < 0.04:
        method, path = rng.choice(("GET", "GET", "HEAD", "POST", "OPTIONS", "DELETE")), rng.choice(PLAIN_PATHS)
        return _sent(rng, seed, method, path, b"")
    path, body = copy.deepcopy(rng.choice(BODIES))
    for _ in range(rng.choice((0, 1, 1, 1, 2, 2, 3, 5))):
        _damage_value(rng, body)
    text = _encoded(rng, body)
    if rng.random() < 0.25:
        text = rng.choice(TEXT_DAMAGE)(rng, text)
    if path == "/v1/files":
        return _sent(rng, seed, "POST", path, _upload(rng, body, text), f"multipart/form-data; boundary={BOUNDARY}")
    if rng.random() < 0.02:
        path = rng.choice((*PLAIN_PATHS, "/v1/completions?a=b", "/v1/../v1/completions", "//v1/completions"))
    return _sent(rng, seed, "POST", path, text)


# ---- within the JSON -----------------------------------------------------------------------------------------------


def _damage_value(rng: random.Random, body: dict[str, Any]) -> None:
    """Change one value, name or place somewhere in the body."""
    holder = rng.choice([each for each in _containers(body) if each] or [body])
    if isinstance(holder, list):
        place: Any = rng.randrange(len(holder)) if holder else 0
        what = rng.choice(("value", "value", "more", "drop"))
        if what == "more":
            holder.extend(copy.deepcopy(holder) * rng.choice((1, 1, 50)))
        elif what == "drop" and holder:
            del holder[place]
        elif holder:
            holder[place] = _weird(rng)
        return
    name = rng.choice(list(holder) or ["x"])
    what = rng.choice(("value", "value", "value", "add", "add", "drop", "rename", "wrap", "swap"))
    if what == "value":
        holder[name] = _weird(rng)
    elif what == "add":
        holder[rng.choice(NAMES)] = rng.choice((_weird, _plausible))(rng)
    elif what == "drop":
        holder.pop(name, None)
    elif what == "rename" and name in holder:
        holder[rng.choice((name + "s", name[:-1], name.upper(), "_" + name, rng.choice(NAMES)))] = holder.pop(name)
    elif what == "wrap" and name in holder:
        holder[name] = rng.choice(([holder[name]], {name: holder[name]}, [[holder[name]]], str(holder[name])))
    else:
        holder[name] = holder.get(rng.choice(list(holder) or ["x"]))


def _containers(value: Any) -> list[Any]:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return [value, *(found for each in inner for found in _containers(each))] if isinstance(value, (dict, list)) else []


def _weird(rng: random.Random) -> Any:
    return copy.deepcopy(rng.choice(WEIRD))


def _plausible(rng: random.Random) -> Any:
    return copy.deepcopy(rng.choice([value for _, body in BODIES for value in body.values()]))


def _encoded(rng: random.Random, body: dict[str, Any]) -> bytes:
    text = json.dumps(body, ensure_ascii=rng.random() < 0.5)
    return text.encode("utf-8", "surrogatepass")


# ---- the text ------------------------------------------------------------------------------------------------------


def _cut(rng: random.Random, text: bytes) -> bytes:
    return text[: rng.randrange(len(text) + 1)]


def _flipped(rng: random.Random, text: bytes) -> bytes:
    data = bytearray(text)
    for _ in range(rng.choice((1, 1, 5, 50))):
        if data:
            data[rng.randrange(len(data))] = rng.randrange(256)
    return bytes(data)


def _with_literal(rng: random.Random, text: bytes) -> bytes:
    return text.replace(rng.choice((b"null", b"0.5", b"2", b"true", b'"a"')), rng.choice(LITERALS).encode(), 1)


def _repeated_name(rng: random.Random, text: bytes) -> bytes:
    name = rng.choice(NAMES)
    return b"{" + b",".join([json.dumps({name: _weird(rng)})[1:-1].encode()] * rng.choice((2, 2, 300))) + b"," + text[1:]


def _deep(rng: random.Random, text: bytes) -> bytes:
    depth, opening, closing = rng.choice((20, 2000, 40_000)), *rng.choice(((b"[", b"]"), (b'{"a":', b"}")))
    nest = opening * depth + b"1" + closing * depth
    return b'{"' + rng.choice(NAMES).encode("utf-8", "replace") + b'":' + nest + b"," + text[1:]


TEXT_DAMAGE: tuple[Callable[[random.Random, bytes], bytes], ...] = (
    _cut, _flipped, _with_literal, _repeated_name, _deep,
    lambda rng, text: text + rng.choice((b" ", b"\n" * 5000, b"{}", b"\x00", text)),
    lambda rng, text: rng.choice((b"\xef\xbb\xbf", b" " * 70_000, b"\xff", b"//x\n")) + text,
    lambda rng, text: text.decode("utf-8", "replace").encode(rng.choice(("utf-16", "utf-32", "utf-7"))),
    lambda rng, text: rng.choice((b"", b"null", b"[]", b"5", b'"x"', b"[" + text + b"]", bytes(100), rng.randbytes(200))),
)  # fmt: skip

# ---- how it is sent ------------------------------------------------------------------------------------------------


def _upload(rng: random.Random, body: dict[str, Any], text: bytes) -> bytes:
    """A file in a multipart body: the fields of `body`, or `text` as the file."""
    lines = body.get("file")
    content = b"\n".join(_encoded(rng, line) for line in lines) if isinstance(lines, list) and rng.random() < 0.5 else text
    fields = (("purpose", str(body.get("purpose")).encode("utf-8", "replace")), ('file"; filename="a.jsonl', content))
    parts = [f'--{BOUNDARY}\r\nContent-Disposition: form-data; name="{name}"\r\n\r\n'.encode() + data for name, data in fields]
    rng.shuffle(parts)
    whole = b"\r\n".join([*parts, f"--{BOUNDARY}--\r\n".encode()])
    return rng.choice(TEXT_DAMAGE)(rng, whole) if rng.random() < 0.2 else whole


def _sent(rng: random.Random, seed: int, method: str, path: str, text: bytes, kind: str = "application/json") -> Case:
    headers = {
        "Host": "localhost",
        "Content-Type": rng.choice(CONTENT_TYPES) if rng.random() < 0.05 else kind,
    }
    if rng.random() < 0.15:
        text, headers["Content-Encoding"] = _packed(rng, text)
    if rng.random() < 0.3:
        name = rng.choice(list(HEADERS))
        headers[name] = rng.choice(HEADERS[name])
    is_http, leave = True, rng.choice(("early", "mid")) if rng.random() < 0.06 else ""
    chunked = rng.random() < 0.1
    body = _chunks(rng, text) if chunked else text
    headers["Transfer-Encoding" if chunked else "Content-Length"] = "chunked" if chunked else str(len(text))
    version = "HTTP/1.0" if not chunked and rng.random() < 0.03 else "HTTP/1.1"
    head = f"{method} {path} {version}\r\n" + "".join(f"{name}: {value}\r\n" for name, value in headers.items()) + "\r\n"
    data = head.encode("latin-1", "replace")
    if rng.random() < 0.04:
        is_http, (data, body) = False, _below_http(rng, data, body)
    third = 1 + len(body) // 3
    parts = [data, *(body[at : at + third] for at in range(0, len(body), third))]
    pieces = [data + body] if rng.random() < 0.8 else parts
    is_plain = is_http and all(value.isascii() and value.isprintable() for value in headers.values())
    return Case(seed, pieces, leave, is_plain and headers["Host"] != "[::1" and "Upgrade" not in headers)


def _packed(rng: random.Random, text: bytes) -> tuple[bytes, str]:
    """Compress the text; the header usually names the right encoding."""
    zeros = gzip.compress(bytes(rng.choice((10, 10**6))), mtime=0)
    packed = rng.choice((gzip.compress(text, mtime=0), zlib.compress(text), zeros, text))
    packed = packed[: rng.randrange(len(packed) + 1)] if rng.random() < 0.2 else packed
    return packed, "gzip" if packed[:2] == b"\x1f\x8b" or rng.random() < 0.2 else "deflate"


def _chunks(rng: random.Random, text: bytes) -> bytes:
    size = rng.choice((1, 7, 100, 10**6)) if len(text) < 2000 else 10**6
    parts = [text[at : at + size] for at in range(0, len(text), size)]
    return b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in parts) + b"0\r\n\r\n"


def _below_http(rng: random.Random, head: bytes, body: bytes) -> tuple[bytes, bytes]:
    """Break the HTTP syntax, or make a header contradict the body."""
    both = b"Content-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n"
    return rng.choice(
        (
            (_flipped(rng, head), body),
            (head, body[: len(body) // 2]),
            (head, body + b"more"),
            (head[:-2] + b"no colon\r\n\r\n", body),
            (head.replace(b"Content-Length: ", b"Content-Length: -"), body),
            (head.replace(b"\r\n", b"\n"), body),
            (rng.randbytes(100), b""),
            (head[:-2] + both, body),
            (head[: len(head) // 2], b""),
        )
    )
