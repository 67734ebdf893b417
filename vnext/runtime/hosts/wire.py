"""Wire: a connection between two hosts of one engine, on which both have proved that they know the engine's secret.

Owns the handshake and the frames. Each side sends its version and a nonce; then the host, and after it the master, proves the
secret with an HMAC over both nonces and its role, so that no proof can be sent back or used again. A frame is its length, a keyed
hash over direction, number and bytes, and the bytes: one that was changed, left out or repeated ends the connection. Frames are not
encrypted.
"""

from __future__ import annotations

import hmac
import secrets
import socket
import struct
import threading
import time
from contextlib import suppress
from hashlib import blake2b, sha256
from pathlib import Path
from typing import Literal, TypeVar

import msgspec

from vnext.base.spelling import reason
from vnext.base.version import __version__
from vnext.runtime.processes.readable import readable
from vnext.runtime.protocol.settings import SettingsError

Role = Literal["master", "host"]
FRAME_BYTES_MAX = 1 << 30
HANDSHAKE_BYTES_MAX = 4096
SEND_TIMEOUT_S = 10.0
MAC_BYTES = 16
PIECE_BYTES = 1 << 18
SHOWN_CHARACTERS_MAX = 200
_length = struct.Struct("<I")
_numbered = struct.Struct("<?Q")


class WireBroken(Exception):
    """The connection has ended or carries what no peer of ours sends; another one may follow."""


class WireRefused(Exception):
    """The peer is not one that this engine may work with: one sentence with the remedy."""


class Greeting(msgspec.Struct, frozen=True, array_like=True, tag="vnext"):
    """The first frame of each side."""

    version: str
    nonce: bytes


class Proof(msgspec.Struct, frozen=True, array_like=True, tag="proof"):
    """That its sender knows the secret."""

    digest: bytes


Said = TypeVar("Said", Greeting, Proof)


class Refusal(msgspec.Struct, frozen=True, array_like=True, tag="refusal"):
    """Why the connection ends."""

    message: str


_handshake = msgspec.msgpack.Decoder(Greeting | Proof | Refusal)
_encode = msgspec.msgpack.Encoder().encode


class Wire:
    """One authenticated connection. `send` may be called by several threads, `receive` by one. Mutable."""

    def __init__(self, connection: socket.socket, key: bytes, role: Role) -> None:
        """Takes over the connection, which `connected` has made."""
        self._socket, self._key, self._is_master = connection, key, role == "master"
        self._sending, self._sent, self._received = threading.Lock(), 0, 0
        self._pieces = bytearray()
        self.is_open = True
        self.sent_bytes = 0

    def fileno(self) -> int:
        return self._socket.fileno()

    @property
    def own_address(self) -> str:
        """This side's address, under which other hosts reach it."""
        return str(self._socket.getsockname()[0])

    def send(self, payload: bytes, is_urgent: bool = True) -> None:
        """Send a frame; blocks for a peer that is behind. One that is not urgent is left out while another is sent. Raises
        WireBroken."""
        if not self._sending.acquire(blocking=is_urgent):
            return
        try:
            frame = _length.pack(len(payload)) + self._mac(self._is_master, self._sent, payload) + payload
            self._socket.sendall(frame)
            self._sent += 1
            self.sent_bytes += len(frame)
        except OSError as error:
            self.close()
            raise WireBroken(f"the connection has ended ({reason(error)})") from error
        finally:
            self._sending.release()

    def wait(self, timeout_s: float) -> bool:
        """Whether something arrives within this time, or the connection has ended."""
        with suppress(ValueError):  # closed by another thread
            return bool(readable((self._socket,), timeout_s))
        return True

    def receive(self) -> list[bytes]:
        """The frames that have arrived, without waiting. Raises WireBroken."""
        has_ended = False
        try:
            while data := self._socket.recv(PIECE_BYTES, socket.MSG_DONTWAIT):
                self._pieces += data
            has_ended = True
        except BlockingIOError:
            pass
        except OSError as error:
            self.close()
            raise WireBroken(f"the connection has ended ({reason(error)})") from error
        if not (found := self._whole()) and has_ended:
            self.close()
            raise WireBroken("the other side has ended the connection")
        return found

    def _whole(self) -> list[bytes]:
        found, head_bytes = [], _length.size + MAC_BYTES
        while len(self._pieces) >= head_bytes:
            size = _length.unpack_from(self._pieces)[0]
            if size > FRAME_BYTES_MAX:
                self.close()
                raise WireBroken(f"a frame of {size} bytes is over the bound of {FRAME_BYTES_MAX}")
            if len(self._pieces) < head_bytes + size:
                break
            mac, payload = bytes(self._pieces[_length.size : head_bytes]), bytes(self._pieces[head_bytes : head_bytes + size])
            if not hmac.compare_digest(mac, self._mac(not self._is_master, self._received, payload)):
                self.close()
                raise WireBroken("a frame was changed on its way, left out or repeated")
            self._received += 1
            del self._pieces[: head_bytes + size]
            found.append(payload)
        return found

    def _mac(self, from_master: bool, number: int, payload: bytes) -> bytes:
        return blake2b(_numbered.pack(from_master, number) + payload, key=self._key, digest_size=MAC_BYTES).digest()

    def close(self) -> None:
        """End the connection. Idempotent."""
        self.is_open = False
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


def connected(
    connection: socket.socket, secret: bytes, role: Role, timeout_s: float = SEND_TIMEOUT_S, send_timeout_s: float = SEND_TIMEOUT_S
) -> Wire:
    """The wire over a new connection, once both sides have proved the secret within `timeout_s`. A peer that takes nothing for
    `send_timeout_s` is lost; 0 waits. Raises WireBroken or WireRefused, and closes the connection then."""
    connection.settimeout(timeout_s)
    end_s = time.monotonic() + timeout_s
    try:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        key = _agreed_key(connection, secret, role, end_s)
        connection.settimeout(None)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("@ll", int(send_timeout_s), 0))
        return Wire(connection, key, role)
    except OSError as error:
        connection.close()
        raise WireBroken(f"the connection ended in the handshake ({reason(error)})") from error
    except (WireBroken, WireRefused):
        connection.close()
        raise


def link_key(secret: bytes, store: str) -> bytes:
    """What the ranks that meet at `store` have to prove to each other: it never travels between hosts."""
    return hmac.digest(secret, b"links of " + store.encode(), sha256)


def _agreed_key(connection: socket.socket, secret: bytes, role: Role, end_s: float) -> bytes:
    own = Greeting(__version__, secrets.token_bytes(32))
    _put(connection, own)
    other = _take(connection, Greeting, end_s)
    if other.version != own.version:
        theirs = shown(other.version)
        raise WireRefused(f"the other host has vnext {theirs} and this one {own.version}: install one version on all hosts")
    nonces = own.nonce + other.nonce if role == "master" else other.nonce + own.nonce
    proofs = {each: hmac.digest(secret, each.encode() + nonces, sha256) for each in ("master", "host")}
    if role == "host":
        _put(connection, Proof(proofs[role]))
    found = _take(connection, Proof, end_s)
    if not hmac.compare_digest(found.digest, proofs["host" if role == "master" else "master"]):
        refusal = "the two hosts have different secrets: give --cluster-secret-file the same contents on all hosts"
        _put(connection, Refusal(refusal))
        raise WireRefused(refusal)
    if role == "master":
        _put(connection, Proof(proofs[role]))
    return hmac.digest(secret, b"key" + nonces, sha256)


def _put(connection: socket.socket, message: Greeting | Proof | Refusal) -> None:
    data = _encode(message)
    connection.sendall(_length.pack(len(data)) + data)


def _take(connection: socket.socket, wanted: type[Said], end_s: float) -> Said:
    """The other side's next message of the handshake, which ends at `end_s` of the monotonic clock."""
    size = _length.unpack(_exactly(connection, _length.size, end_s))[0]
    if size > HANDSHAKE_BYTES_MAX:
        raise WireBroken(f"a handshake of {size} bytes is none of vnext's")
    try:
        message = _handshake.decode(_exactly(connection, size, end_s))
    except (ValueError, RecursionError) as error:
        raise WireBroken(f"the other side does not speak vnext's protocol ({shown(str(error))})") from error
    if isinstance(message, Refusal):
        raise WireRefused(shown(message.message))
    if not isinstance(message, wanted):
        raise WireBroken("the other side's handshake is out of order")
    return message


def shown(text: str) -> str:
    """The words of a peer that may be anyone, as part of a line."""
    return "".join(each if each.isprintable() else "?" for each in text[:SHOWN_CHARACTERS_MAX])


def _exactly(connection: socket.socket, size: int, end_s: float) -> bytes:
    found = bytearray()
    while len(found) < size:
        if (left_s := end_s - time.monotonic()) <= 0:
            raise WireBroken("the other side was too slow in the handshake")
        connection.settimeout(left_s)
        data = connection.recv(size - len(found))
        if not data:
            raise WireBroken("the other side has ended the connection in the handshake")
        found += data
    return bytes(found)


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
