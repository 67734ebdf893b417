"""Images, videos and sounds of conversations: what stands for them in a prompt's text, and the prompt as the engine gets it.

Imported where the engine's model reads any: other servers need no numpy.
"""

from __future__ import annotations

from asyncio import wrap_future
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import MappingProxyType

from vnext.media.custom import Custom, custom_of
from vnext.media.pictures import MediaError, NoRoom
from vnext.media.reader import IMAGES_MAX, ImageReader, Shown
from vnext.media.sources import MediaRules
from vnext.runtime.protocol.sampling_params import InvalidRequest
from vnext.server.context.errors import MediaFull
from vnext.server.context.text_work import Shares, TextWork
from vnext.server.settings import ServerSettings

JsonFields = Mapping[str, object]
NO_FIELDS: JsonFields = MappingProxyType({})
FETCHES_MAX = 8
"""At once, of all clients. One may have half of them."""


class PromptImages:
    """The images, videos and sounds of one server's conversations. `shown` stands for each in the messages from which prompts are
    made, by kind."""

    def __init__(self, settings: ServerSettings, sizes: str, work: TextWork) -> None:
        """`sizes`: as ImageReader's. Raises MediaError."""
        rules = MediaRules(settings.allowed_local_media_path, settings.allowed_media_domains)
        addresses = settings.engine_address, *settings.other_engines
        self._reader, self._work = ImageReader(Path(settings.model_path), sizes, addresses, rules), work
        self._fetching, self._shares = ThreadPoolExecutor(FETCHES_MAX, "media"), Shares(FETCHES_MAX // 2)
        self.shown = self._reader.shown

    async def read(
        self, asked: Sequence[tuple[str, str, str]], client: str,
        processor: JsonFields = NO_FIELDS, reading: JsonFields = NO_FIELDS,
    ) -> list[Shown]:
        """The images, videos and sounds of a prompt at (address, name, kind), where ranks find them, one after the other: what
        comes from elsewhere is in memory once. `processor`, `reading`: mm_processor_kwargs and media_io_kwargs. Raises
        InvalidRequest, Overloaded, MediaFull."""
        with _refused(asked[0][1]):
            if len(asked) > IMAGES_MAX:
                raise MediaError(f"{asked[IMAGES_MAX][1]} is one too many: a prompt may have {IMAGES_MAX} {self._reader.kind}")
            custom = custom_of(processor, reading)
            is_alone = sum(kind == "image" for _, _, kind in asked) == 1
            return [await self._read(*each, client, is_alone, custom) for each in asked]

    async def _read(self, address: str, name: str, kind: str, client: str, is_alone: bool, custom: Custom) -> Shown:
        given: str | bytes = address
        if not address[:5].lower().startswith("data:"):
            given = await self._fetched(address, name, client)
        reader = self._reader
        work = {
            "image": partial(reader.seen, given, name, is_alone, custom), "video": partial(reader.film, given, name, custom),
            "audio": partial(reader.heard, given, name, custom),
        }[kind]  # fmt: skip
        return await self._work.run_media(len(given), client, work)

    async def _fetched(self, address: str, name: str, client: str) -> bytes:
        return await wrap_future(await self._shares.submit(self._fetching, client, partial(self._reader.bytes_at, address, name)))

    def close(self) -> None:
        """Fetch nothing more."""
        self._fetching.shutdown(wait=False, cancel_futures=True)

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
    except NoRoom as error:
        raise MediaFull(f"{error}: send it again later.") from error
    except MediaError as error:
        name = str(error).partition(" ")[0]
        raise InvalidRequest(f"{error}.", name if "." in name else param) from error
