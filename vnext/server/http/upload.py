"""Upload: a request's body as it comes, at the pace at which it must come."""

from __future__ import annotations

import asyncio
import time

from aiohttp import StreamReader, web

from vnext.runtime.protocol.sampling_params import InvalidRequest
from vnext.server.context.errors import BodyTooSlow, ClientGone

PAUSE_S = 30.0  # without a byte
BYTES_PER_S_MIN = 1_000  # on average, after the first PAUSE_S: less than a modem sends


class Upload:
    """A body as it comes. Accepts a slow upload that makes progress; refuses one that only holds the connection. Mutable."""

    def __init__(self, content: StreamReader) -> None:
        self._content, self._size, self._started_s = content, 0, time.monotonic()

    async def part(self) -> bytes:
        """The next part. Raises BodyTooSlow, ClientGone, InvalidRequest."""
        try:
            if self._content.is_eof():  # all of it is here
                return self._content.read_nowait()
            left_s = self._started_s + PAUSE_S + self._size / BYTES_PER_S_MIN - time.monotonic()
            async with asyncio.timeout(min(PAUSE_S, max(left_s, 0))):
                part = await self._content.readany()
            self._size += len(part)
            return part
        except TimeoutError:
            raise BodyTooSlow(
                f"The body came too slowly: {self._size} bytes in {time.monotonic() - self._started_s:.0f} s, at least "
                f"{BYTES_PER_S_MIN} in each second and one in {PAUSE_S:g} s are needed."
            ) from None
        except ConnectionError as error:
            raise ClientGone from error
        except web.RequestPayloadError as error:
            raise InvalidRequest("The body is cut off, or does not match its headers: send all of it.") from error
