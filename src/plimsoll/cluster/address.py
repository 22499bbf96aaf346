"""Whether a Ray cluster's address is there at all; needs no Ray."""

from __future__ import annotations

import socket


def knock(address: str) -> None:
    """Fail at once where nothing listens: Ray itself tries again for minutes.

    Raises OSError where nothing answers, ValueError where it is not host:port.
    """
    host, _, port = address.rpartition(":")
    socket.create_connection((host, int(port)), timeout=10).close()
