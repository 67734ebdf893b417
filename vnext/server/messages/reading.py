"""Reading: content blocks as text.

Owns what a block of each type says to a model that reads text only. An image or a file that is no text becomes a placeholder: it
stays in the client's history, and a refusal would end the session for good. What ran at Anthropic is passed over.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from vnext.runtime.protocol.sampling_params import InvalidRequest
from vnext.server.messages.bodies import Block

PASSED_OVER = frozenset(
    "server_tool_use mcp_tool_use container_upload tool_reference web_search_tool_result web_fetch_tool_result "
    "code_execution_tool_result bash_code_execution_tool_result text_editor_code_execution_tool_result tool_search_tool_result "
    "mcp_tool_result advisor_tool_result".split()
)
"""Calls of tools that ran at Anthropic, and their results: what they say is in the words that followed."""
_PLACEHOLDERS = {
    "image": "[An image was here. This model reads text only.]",
    "document": "[A file was here. This model reads text only.]",
}


def blocks_of(content: str | Sequence[Block], path: str) -> Iterator[tuple[Block, str]]:
    """Each block that is not passed over, with its place."""
    assert not isinstance(content, str)
    for place, block in enumerate(content):
        if block.type not in PASSED_OVER:
            yield block, f"{path}.content[{place}]"


def text_of(block: Block, path: str) -> str:
    """A block's text. Raises InvalidRequest for a type that has none."""
    match block.type:
        case "text":
            if block.text is None:
                raise InvalidRequest(f"{path}.text is missing: it is required.", f"{path}.text")
            return block.text
        case "image":
            return _PLACEHOLDERS["image"]
        case "document":
            return _document(block, f"{path}.source")
        case "search_result":
            source = block.source if isinstance(block.source, str) else None
            return _titled(_content(block.content, path), block.title, source)
        case "compaction":
            return _content(block.content, path)
    raise InvalidRequest(f"{path}.type is {block.type!r}: this server reads text only here, leave it out.", f"{path}.type")


def result_of(block: Block, path: str) -> str:
    """A tool's result. Chat templates know no failed results: the text says so."""
    text = _content(block.content, path)
    return f"Error: {text}" if block.is_error else text


def _document(block: Block, path: str) -> str:
    """Of its own text, or a placeholder."""
    match block.source:
        case {"type": "text", "data": str(text)} | {"type": "content", "content": str(text)}:
            return _titled(text, block.title, block.context)
        case {"type": "content", "content": [*parts]}:
            texts = [part["text"] if _is_text(part) else _PLACEHOLDERS["image"] for part in parts]
            return _titled("\n".join(texts), block.title, block.context)
        case {"type": "base64" | "url" | "file"}:
            return _titled(_PLACEHOLDERS["document"], block.title, block.context)
    raise InvalidRequest(f"{path} is no document: its type must be 'text', 'content', 'base64', 'url' or 'file'.", path)


def _is_text(part: object) -> bool:
    return isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)


def _titled(text: str, *heads: str | None) -> str:
    return "\n".join([*filter(None, heads), text])


def _content(content: object, path: str) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    if isinstance(content, dict):
        raise InvalidRequest(f"{path}.content is an object: send a text or a list of blocks.", f"{path}.content")
    return "\n".join(text_of(each, where) for each, where in blocks_of(content, path))
