"""Images of conversations: what stands for them in a prompt's text, and the prompt as the engine gets it.

Imported where the engine's model reads images: other servers need no numpy.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from vnext.media.pictures import MediaError
from vnext.media.reader import ImageReader, Shown
from vnext.runtime.protocol.sampling_params import InvalidRequest
from vnext.server.context.text_work import TextWork


class PromptImages:
    """The images of one server's conversations. `shown` stands for each in the messages from which prompts are made, by kind."""

    def __init__(self, model_path: str, sizes: str, addresses: Sequence[str], work: TextWork) -> None:
        """`sizes` and `addresses`: as ImageReader's. Raises MediaError."""
        self._reader, self._work = ImageReader(Path(model_path), sizes, addresses), work
        self.shown = {"image": self._reader.shown, "video": self._reader.shown_film}

    async def read(self, asked: Sequence[tuple[str, str, bool]], client: str) -> list[Shown]:
        """The images and videos, as ImageReader has them, where ranks find them. Raises InvalidRequest, Overloaded."""
        with _refused(asked[0][1]):
            return await self._work.run(sum(len(each) for each, *_ in asked), client, partial(self._reader.at, asked))

    def written(self, text: str, images: Sequence[Shown]) -> str:
        """The prompt's text. Raises InvalidRequest where it has other marks than those of its images."""
        with _refused("messages"):
            return self._reader.written(text, images)

    def packed(self, tokens: Sequence[int], images: Sequence[Shown]) -> bytes:
        """The tokens of `written` as the engine gets them: int32 bytes. Raises InvalidRequest."""
        with _refused("messages"):
            return self._reader.packed(tokens, images)


@contextmanager
def _refused(param: str) -> Iterator[None]:
    try:
        yield
    except MediaError as error:
        name = str(error).partition(" ")[0]
        raise InvalidRequest(f"{error}.", name if "." in name else param) from error
