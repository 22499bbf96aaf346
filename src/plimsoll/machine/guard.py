"""Who may ask an HTTP server: callers that send its token, under a name of the server.

Loopback proves nothing about a caller: every user of the machine reaches it, and so does every web
page that a browser here shows, under a name of its own that leads to 127.0.0.1.
"""

from __future__ import annotations

import importlib.util
import secrets
import socket
from base64 import b64decode
from collections.abc import AsyncIterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from ipaddress import ip_address
from urllib.parse import urlsplit

from plimsoll.errors import ConfigError

_PACKAGES = ("starlette", "uvicorn")


def require_server(way_without: str = "") -> None:
    """Raise ConfigError if a server's packages are not installed; `way_without` ends its text."""
    missing = [name for name in _PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(
            f"The server needs {' and '.join(missing)}, which is not installed. Install "
            f"it: pip install {' '.join(missing)}.{way_without}"
        )


def is_loopback(host: str) -> bool:
    """Return whether only this machine can reach an address; of names, `localhost` alone is one."""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def url_of(host: str, listening: socket.socket) -> str:
    """Return the URL of a socket that listens at a host's address, as `http://[::1]:8000`."""
    name = f"[{host}]" if ":" in host else host
    return f"http://{name}:{listening.getsockname()[1]}"


def bind_socket(host: str, port: int, key: str = "--port") -> socket.socket:
    """Return a socket that listens at an address, or raise ConfigError if it is taken.

    `key` is the setting of the port.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family)
    except (OSError, OverflowError) as error:  # the latter of a port beyond 65535
        why = getattr(error, "strerror", None) or error
        raise ConfigError(
            f"The server cannot use {host}:{port}: {why}. Give another {key}, or 0 for a free one."
        ) from error


MOST_BYTES = 64 * 2**20
"""The longest body of a request that is read; one for 32 rewards has less than 1 MiB mostly."""

Headers = Mapping[str, str]
"""The headers of a request, which are found whatever their case."""


class TooLong(Exception):
    """The body of a request is longer than what is read."""


@dataclass(frozen=True)
class Guard:
    """Decides which requests a server answers.

    Attributes:
        token: What callers send; not empty.
        host: The address at which the server listens.
    """

    token: str
    host: str

    def fits(self, token: str) -> bool:
        """Return whether a token is the server's, in a time that does not depend on the token."""
        return secrets.compare_digest(token.encode(), self.token.encode())

    def refusal(self, headers: Headers) -> tuple[int, str] | None:
        """Return HTTP status and reason if a request for JSON is refused by its headers."""
        if not is_addressed(headers, self.host):
            return 421, WRONG_HOST
        if not self.fits(sent_token(headers)):
            return 401, "Send the server's token: Authorization: Bearer TOKEN"
        if headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
            return 415, "Send JSON: Content-Type: application/json"
        return None


WRONG_HOST = "This server listens on loopback, and the header Host names another: ask for localhost"


def is_addressed(headers: Headers, host: str) -> bool:
    """Return whether a request asks for the server that listens at `host`.

    A server on loopback is asked for by a name of loopback. Elsewhere a server does not know its
    names in the network: there the token decides alone.
    """
    if not is_loopback(host):
        return True
    try:
        name = urlsplit(f"//{headers.get('host', '')}").hostname
    except ValueError:
        return False
    return name is not None and is_loopback(name)


def sent_token(headers: Headers) -> str:
    """Return the token that a request sends; "" if it sends none.

    It comes as `Authorization: Bearer TOKEN`, or as the password of `Basic`: callers that take only
    a URL send that for `http://any:TOKEN@host`.
    """
    scheme, _, sent = headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer":
        return sent
    if scheme.lower() == "basic":
        with suppress(ValueError):
            return b64decode(sent).decode().partition(":")[2]
    return ""


async def read_body(parts: AsyncIterable[bytes]) -> bytes:
    """Return the body of a request, which comes in parts.

    Raises:
        TooLong: The body has more than `MOST_BYTES`.
    """
    body = bytearray()
    async for part in parts:
        body += part
        if len(body) > MOST_BYTES:
            raise TooLong(f"A request may have {MOST_BYTES >> 20} MiB: send fewer rows in each")
    return bytes(body)
