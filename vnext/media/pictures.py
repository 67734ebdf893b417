"""Pictures: bytes of a file -> pixels. Owns which formats there are, and how many bytes and pixels one image may have.

What is wrong with an image is one sentence that begins with its name, which callers choose (`messages[0].content[1]`).
"""

from __future__ import annotations

from io import BytesIO
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from PIL import Image

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "AVIF")
BYTES_MAX = 20 << 20
PIXELS_MAX = 40_000_000
SCANS_MAX = 100
"""Of a JPEG, where cameras and browsers write ten: each goes over all pixels, and takes 60 bytes."""


class MediaError(ValueError):
    """A user's image that cannot be read, in one sentence."""


class NoRoom(MediaError):
    """One that cannot be kept now, in one sentence."""


def picture_of(data: bytes, name: str, pixels_max: int = PIXELS_MAX) -> np.ndarray:
    """The first frame of a file as `pixels_of` has it. Raises MediaError."""
    if len(data) > BYTES_MAX:
        raise MediaError(f"{name} has {len(data)} bytes: an image may have {BYTES_MAX}")
    try:
        from PIL import Image
    except ImportError as error:
        raise MediaError(f"{name} is an image, and Pillow is missing here: pip install 'vnext[images]'") from error
    try:
        with Image.open(BytesIO(data), formats=FORMATS) as image:
            size, scans = f"{image.width} x {image.height}", _scans(data, image)
            if image.width * image.height <= pixels_max and scans <= SCANS_MAX:
                return pixels_of(image, name)
    except Image.DecompressionBombError as error:  # Pillow's own bound, above which it tells no size
        raise MediaError(f"{name} has too many pixels: an image may have {pixels_max}") from error
    except MediaError:
        raise
    except Exception as error:  # decoders raise what they like
        raise MediaError(f"{name} is no image that can be read: it must be {', '.join(FORMATS)}") from error
    if scans > SCANS_MAX:
        raise MediaError(f"{name} has {scans} scans: an image may have {SCANS_MAX}, save it again")
    raise MediaError(f"{name} has {size} pixels: an image may have {pixels_max}")


def _scans(data: bytes, image: Image.Image) -> int:
    """How often a JPEG goes over its pixels, at most: its mark of a scan stands in no compressed bytes."""
    return data.count(b"\xff\xda") if image.format in ("JPEG", "MPO") else 1


def pixels_of(image: Image.Image, name: str) -> np.ndarray:
    """An image of Pillow as uint8 [height, width, 3], turned as its EXIF says, what is transparent on white. Raises MediaError."""
    from PIL import Image, ImageOps

    try:
        image = ImageOps.exif_transpose(image)
        if image.mode.startswith("I;16"):  # Pillow would take what is above 255 for white
            image = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
        if "A" in image.getbands() or image.info.get("transparency") is not None:
            clear = image.convert("RGBA")
            image = Image.alpha_composite(Image.new("RGBA", clear.size, (255, 255, 255, 255)), clear)
        return np.array(image.convert("RGB"))
    except Exception as error:  # a file is decoded when its pixels are asked for
        raise MediaError(f"{name} is no image that can be read: its {image.format} is damaged or cut off") from error
