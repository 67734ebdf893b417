"""The secret that all hosts of an engine share, in a file, since others can read command lines."""

from __future__ import annotations

from pathlib import Path

from vnext.runtime.protocol.settings import SettingsError

BYTES_MIN = 16


def secret_of(path: str) -> bytes:
    """The secret in a file, without white space around it. Raises SettingsError."""
    try:
        secret = Path(path).expanduser().read_bytes().strip()
    except OSError as error:
        why = f"cluster_secret_file {path} cannot be read ({error.strerror})"
        raise SettingsError(f"{why}: give a file that all hosts have") from error
    if len(secret) < BYTES_MIN:
        raise SettingsError(f"cluster_secret_file {path} has {len(secret)} bytes: a secret has at least {BYTES_MIN}")
    return secret
