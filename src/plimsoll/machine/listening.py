"""What all of Plimsoll's HTTP servers begin with: their packages, and an address."""

from __future__ import annotations

import importlib.util
import socket
from ipaddress import ip_address

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
