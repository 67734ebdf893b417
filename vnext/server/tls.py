"""TLS and address: the socket that the server listens on, the certificate that it shows, and those that it asks of clients.
Imports nothing slow.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from vnext.base.spelling import reason
from vnext.server.settings import ServerSettings

if TYPE_CHECKING:
    import ssl
import errno
import ipaddress
import socket


class TlsUnusable(Exception):
    """The files of the settings are no certificate and key: one sentence with the remedy."""


def tls_context(settings: ServerSettings) -> ssl.SSLContext | None:
    """The context of a server that speaks HTTPS, None without a certificate. Raises TlsUnusable."""
    if not settings.ssl_certfile:
        if settings.ssl_keyfile or settings.ssl_ca_certs or settings.ssl_cert_reqs:
            raise TlsUnusable("the server has no certificate for HTTPS: give it one with --ssl-certfile")
        return None
    import ssl

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(settings.ssl_certfile, settings.ssl_keyfile or None, password=_no_password)
        if settings.ssl_ca_certs:
            context.load_verify_locations(settings.ssl_ca_certs)
    except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
        files = ", ".join(filter(None, (settings.ssl_certfile, settings.ssl_keyfile, settings.ssl_ca_certs)))
        raise TlsUnusable(f"{files} cannot be read as certificate and key ({reason(error)}): give PEM files that match") from error
    context.verify_mode = ssl.VerifyMode(settings.ssl_cert_reqs)
    return context


def unverified_context() -> ssl.SSLContext:
    """The context of a client that takes any certificate."""
    import ssl

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context


READS = "set_default_verify_paths"
"""The method of a context, of its base class, that reads the certificates of the machine."""


def verifying_context() -> ssl.SSLContext:
    """The context of an HTTP client that checks certificates, by those of the machine once `load_default_certs` has read them."""
    import ssl

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.set_alpn_protocols(("http/1.1",))
    return context


@contextmanager
def without_certificates() -> Iterator[None]:
    """For an import of aiohttp, which reads all certificates of the machine twice, 18 ms each, for clients of HTTPS that do not say
    how they check them, and for those that check none. Those of vnext say it."""
    import ssl

    setattr(ssl.SSLContext, READS, lambda context: None)
    try:
        yield
    finally:
        delattr(ssl.SSLContext, READS)


def is_tls_error(error: OSError) -> bool:
    """Whether TLS has failed, not the connection."""
    import ssl

    return isinstance(error, ssl.SSLError)


def _no_password() -> str:
    raise ValueError("the key has a password, and nobody is there to type it")


class AddressUnusable(Exception):
    """The server cannot listen there: one sentence with the port and the remedy."""


def bind(host: str, port: int) -> socket.socket:
    """A socket bound to the port; port 0 takes a free one. It does not listen yet, so the system refuses early clients."""
    try:
        found = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (socket.gaierror, UnicodeError) as error:
        raise AddressUnusable(f"the host {host!r} is unknown: choose another with --host") from error
    family, kind, protocol, _, address = min(found, key=lambda entry: entry[0] != socket.AF_INET)
    listener = socket.socket(family, kind, protocol)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(address)
    except OSError as error:
        listener.close()
        raise unusable(error, host, port) from error
    return listener


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches a server that listens there. A name but localhost may be any address."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def url_at(host: str, port: int, settings: ServerSettings) -> str:
    scheme = "https" if settings.ssl_certfile else "http"
    return f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}{settings.root_path}"


def unusable(error: OSError, host: str, port: int) -> AddressUnusable:
    """The error for an address that the system refused."""
    if error.errno == errno.EADDRINUSE:
        return AddressUnusable(f"port {port} of {host} is in use: end its program or choose another with --port")
    if error.errno == errno.EACCES:
        return AddressUnusable(f"port {port} needs more rights than this user has: choose one above 1023 with --port")
    if error.errno == errno.EADDRNOTAVAIL:
        return AddressUnusable(f"{host} is no address of this machine: choose another with --host")
    return AddressUnusable(f"the server cannot listen on {host} port {port}: {error.strerror}")
