"""A check whether a Ray cluster listens at an address; needs no Ray."""

from __future__ import annotations

import os
import socket

_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])
"""How a client begins HTTP/2, with empty settings; the server's settings are its first answer
(RFC 9113, section 3.4). Ray's head speaks gRPC, which is HTTP/2."""
_SETTINGS = 4
"""The type of a settings frame in HTTP/2."""


def check_reachable(address: str) -> None:
    """Raise OSError soon if no Ray answers at the address; ValueError if it is not host:port.

    Ray itself would try again for minutes.
    """
    host, _, port = address.rpartition(":")
    with socket.create_connection((host, int(port)), timeout=10) as connection:
        if os.environ.get("RAY_USE_TLS", "0").lower() in ("1", "true"):
            return
        connection.sendall(_PREFACE)
        answer = connection.recv(64)
    if len(answer) < 4 or answer[3] != _SETTINGS:
        raise OSError("what listens there is not Ray's head")
