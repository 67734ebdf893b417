"""ServerTalker: the model side of `vnext chat`, a running server that speaks OpenAI's chat API over plain HTTP."""

from __future__ import annotations

import http.client
import urllib.error
import urllib.request
from collections.abc import Generator, Mapping
from typing import Any

import msgspec

from vnext.commands.chat.talker import TOO_LONG, Messages, Sampling, TalkFailed, TalkRefused, TalkTooLong
from vnext.options.reader import ChatCommand

ANSWER_TIMEOUT_S = 600.0
DATA_PREFIX = b"data:"
LAST_DATA = b"[DONE]"


class ServerTalker:
    """A server that speaks OpenAI's chat API."""

    def __init__(self, command: ChatCommand) -> None:
        self._url = command.url
        self._headers = {"Content-Type": "application/json"}
        if command.api_key:
            self._headers["Authorization"] = f"Bearer {command.api_key}"
        self.title, self.context = self._first_model()

    def answer(self, messages: Messages, sampling: Sampling) -> Generator[str, None, int]:
        body = {"model": self.title, "messages": messages, "stream": True, "stream_options": {"include_usage": True}} | sampling
        tokens = 0
        with self._open("/v1/chat/completions", msgspec.json.encode(body)) as response:
            for line in response:
                if line.startswith(DATA_PREFIX) and line[len(DATA_PREFIX) :].strip() != LAST_DATA:
                    chunk = msgspec.json.decode(line[len(DATA_PREFIX) :])
                    tokens = (chunk.get("usage") or {}).get("completion_tokens", tokens)
                    yield piece_of(chunk)
        return tokens

    def _first_model(self) -> tuple[str, int]:
        """The name of the model to use and its context, 0 where the server does not say. Raises TalkRefused, because no chat has
        begun yet."""
        try:
            with self._open("/v1/models") as response:
                model = msgspec.json.decode(response.read())["data"][0]
                length = model.get("max_model_len")
                return model["id"], length if isinstance(length, int) else 0
        except TalkFailed as error:
            raise TalkRefused(str(error)) from error
        except (msgspec.DecodeError, LookupError, TypeError, AttributeError) as error:
            raise TalkRefused(f"{self._url} does not answer as an OpenAI server: is the URL right?") from error

    def _open(self, path: str, body: bytes | None = None) -> http.client.HTTPResponse:
        try:
            request = urllib.request.Request(self._url + path, body, self._headers)
            return urllib.request.urlopen(request, timeout=ANSWER_TIMEOUT_S)
        except urllib.error.HTTPError as error:
            sentence, code = refusal_of(error)
            raise (TalkTooLong if code == TOO_LONG else TalkFailed)(sentence) from error
        except (OSError, ValueError, http.client.HTTPException) as error:
            raise TalkFailed(f"{self._url} cannot be reached ({error}): is a server running there?") from error


def piece_of(chunk: Mapping[str, Any]) -> str:
    """The text of one chunk of a stream. Raises TalkFailed for an error in place of a chunk."""
    if "error" in chunk:
        raise TalkFailed(str(chunk["error"].get("message", chunk["error"])))
    return "".join(choice["delta"].get("content") or "" for choice in chunk.get("choices", ()))


def refusal_of(error: urllib.error.HTTPError) -> tuple[str, str]:
    """The server's own sentence and its code, where it sent them."""
    try:
        found = msgspec.json.decode(error.read())["error"]
        return found["message"], found.get("code") or ""
    except (msgspec.DecodeError, LookupError, TypeError, AttributeError):
        return f"The server answered with HTTP status {error.code} ({error.reason}).", ""
