"""Name keys: the key that hashes request names in a redacted log, in a file beside the log's folder.

The operator keeps the file and can find a ticket's request with it; a folder that is passed on goes without it. Without the
key a hash reveals nothing of the name, even of a short one that a client has chosen. Deleting the file cuts the link for good.
"""

from __future__ import annotations

import logging
import os
import secrets
from pathlib import Path

from vnext.log import pseudonyms

FILE_MODE = 0o600
FLAGS = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC

logger = logging.getLogger(__name__)


def new_name_key(log_dir: Path) -> bytes:
    """A new key, stored in its file. If that cannot be written, no key: a log is worth more than its names."""
    key = secrets.token_bytes(pseudonyms.KEY_SIZE_BYTES)
    try:
        folder = log_dir.resolve()
        fd = os.open(folder.with_name(pseudonyms.name_key_file(folder.name)), FLAGS, FILE_MODE)
        with os.fdopen(fd, "w") as file:
            file.write(f"{key.hex()}\n")
    except OSError as error:
        logger.warning("requests have no names in this log, because their key cannot be written: %s", error)
        return b""
    return key
