"""ServerTalker: the model side of `vnext chat`, a running server that speaks OpenAI's chat API over plain HTTP."""

from __future__ import annotations

from collections.abc import Generator

from vnext.commands.bench.load.answers import Models, RequestFailed
from vnext.commands.bench.load.blocking import BlockingClient
from vnext.commands.chat.talker import TOO_LONG, Messages, Sampling, TalkFailed, TalkRefused, TalkTooLong
from vnext.options.reader import ChatCommand


class ServerTalker:
    """A server that speaks OpenAI's chat API."""

    def __init__(self, command: ChatCommand) -> None:
        self._client = BlockingClient(command.url, command.api_key)
        self.title, self.context = self._first_model()

    def answer(self, messages: Messages, sampling: Sampling) -> Generator[str, None, int]:
        body = {"model": self.title, "messages": messages, "stream": True, "stream_options": {"include_usage": True}, **sampling}
        tokens = 0
        try:
            for chunk in self._client.stream("/v1/chat/completions", body):
                tokens = chunk.usage.completion_tokens if chunk.usage else tokens
                yield chunk.text
        except RequestFailed as error:
            raise self._failed(error) from error
        return tokens

    def _first_model(self) -> tuple[str, int]:
        """The name of the model to use and its context, 0 where the server does not say. Raises TalkRefused, because no chat has
        begun yet."""
        try:
            model = self._client.ask("/v1/models", None, Models).first
            return model.id, model.max_model_len if isinstance(model.max_model_len, int) else 0
        except RequestFailed as error:
            if error.kind == "broken":
                raise TalkRefused(f"{self._client.url} does not answer as an OpenAI server: is the URL right?") from error
            raise TalkRefused(str(self._failed(error))) from error

    def _failed(self, error: RequestFailed) -> TalkFailed:
        """A failed request as the user reads it: the server's own sentence, where there is one."""
        sentence, code = error.stated
        if code == TOO_LONG:
            return TalkTooLong(sentence)
        if not sentence and error.status:
            sentence = f"The server answered with {error.kind}."
        elif not sentence and error.kind == "connect":
            sentence = f"{self._client.url} cannot be reached ({error}): is a server running there?"
        return TalkFailed(sentence or f"The answer broke off: {error}.")
