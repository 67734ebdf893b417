"""One side of `vnext chat`: a running server that speaks OpenAI's chat API, over plain HTTP."""

from __future__ import annotations

import http.client
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from vnext.chat.talker import Messages, TalkFailed, TalkRefused, sampling_options
from vnext.options import ChatCommand

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
        self._options = sampling_options(command)
        self.title = self._first_model()

    def answer(self, messages: Messages) -> Iterator[str]:
        body = {"model": self.title, "messages": messages, "stream": True} | self._options
        with self._open("/v1/chat/completions", msgspec.json.encode(body)) as response:
            for line in response:
                if line.startswith(DATA_PREFIX) and line[len(DATA_PREFIX) :].strip() != LAST_DATA:
                    yield piece_of(msgspec.json.decode(line[len(DATA_PREFIX) :]))

    def _first_model(self) -> str:
        """The name to ask for. Raises TalkRefused: no talk has begun yet."""
        try:
            with self._open("/v1/models") as response:
                return msgspec.json.decode(response.read())["data"][0]["id"]
        except TalkFailed as error:
            raise TalkRefused(str(error)) from error
        except (msgspec.DecodeError, LookupError, TypeError) as error:
            raise TalkRefused(f"{self._url} does not answer as an OpenAI server: is the URL right?") from error

    def _open(self, path: str, body: bytes | None = None) -> http.client.HTTPResponse:
        try:
            request = urllib.request.Request(self._url + path, body, self._headers)
            return urllib.request.urlopen(request, timeout=ANSWER_TIMEOUT_S)
        except urllib.error.HTTPError as error:
            raise TalkFailed(refusal_of(error)) from error
        except (OSError, ValueError, http.client.HTTPException) as error:
            raise TalkFailed(f"{self._url} cannot be reached ({error}): is a server running there?") from error


def piece_of(chunk: Mapping[str, Any]) -> str:
    """The text of one chunk of a stream. Raises TalkFailed for an error that came in place of one."""
    if "error" in chunk:
        raise TalkFailed(str(chunk["error"].get("message", chunk["error"])))
    return "".join(choice["delta"].get("content") or "" for choice in chunk.get("choices", ()))


def refusal_of(error: urllib.error.HTTPError) -> str:
    """The server's own sentence where it sent one."""
    try:
        return msgspec.json.decode(error.read())["error"]["message"]
    except (msgspec.DecodeError, LookupError, TypeError):
        return f"The server answered with HTTP status {error.code} ({error.reason})."
