"""Sounds of requests: bytes of a file to samples, and parts of these to prompts as the engine gets them.

Imported where the engine's model listens: other servers need no numpy.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np

from vnext.media.pictures import MediaError, NoRoom
from vnext.media.sounds import SAMPLE_RATE, SoundReader, sound_of
from vnext.runtime.protocol.sampling_params import InvalidRequest
from vnext.server.context.errors import MediaFull
from vnext.server.context.text_work import TextWork


class PromptSounds:
    """The sounds of one server's requests. `span`: tokens that stand for a sound; `samples`: of one that the model reads whole."""

    rate = SAMPLE_RATE

    def __init__(self, sizes: str, addresses: Sequence[str], work: TextWork) -> None:
        """`sizes`: as the engine tells them; `addresses`: of the engines."""
        self._reader, self._work = SoundReader(sizes, addresses), work
        self.span, self.samples = self._reader.span, self._reader.samples

    async def read(self, data: bytes, client: str) -> np.ndarray:
        """The samples of a file, float32 [N]. Raises InvalidRequest, Overloaded."""
        try:
            return await self._work.run_media(len(data), client, partial(sound_of, data, "file"))
        except MediaError as error:
            raise InvalidRequest(f"{error}.", "file") from error

    def packed(self, samples: np.ndarray, tokens: Sequence[int]) -> bytes:
        """A prompt of a sound float32 [N] and the tokens behind it, int32 bytes; its sound is where ranks find it. Raises
        InvalidRequest, MediaFull."""
        try:
            return self._reader.packed(samples, tokens, "file")
        except NoRoom as error:
            raise MediaFull(f"{error}: send it again later.") from error
        except MediaError as error:
            raise InvalidRequest(f"{error}.", "file") from error
