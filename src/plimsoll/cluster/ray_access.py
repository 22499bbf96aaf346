"""How a run gets to its Ray: the folder of one that it starts, the address of one that it joins.

Only the user can enter the folder. This module needs no Ray.
"""

from __future__ import annotations

import os
import socket
import stat
from pathlib import Path

from plimsoll.errors import PlimsollError

_LONGEST_SOCKET = 107  # bytes of a Unix socket's path (sun_path in unix(7), and its end)
_IN_FOLDER = len("/session_2026-11-28_18-06-30_123456_1234567/sockets/plasma_store")
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])
"""How a client begins HTTP/2, with empty settings; the server's settings are its first answer
(RFC 9113, section 3.4). Ray's head speaks gRPC, which is HTTP/2."""
_SETTINGS = 4
"""The type of a settings frame in HTTP/2."""


def temporary_directory() -> str:
    """Return the directory in which Ray keeps its files, as Ray chooses it."""
    return os.environ.get("RAY_TMPDIR") or os.environ.get("TMPDIR") or "/tmp"


def private_folder() -> Path:
    """Return the user's private folder in `temporary_directory`; it may not exist."""
    return Path(temporary_directory()).absolute() / f"ray-{os.geteuid()}"


def ray_folder() -> Path:
    """Return the folder in which a Ray that a run starts keeps sessions, logs and sockets.

    Ray opens its folder to everybody (mode 0777). So this one lies in a private folder.
    """
    return private_folder() / "r"


def longest_temporary() -> int:
    """Return how many bytes the path of `temporary_directory` may have, for Ray's sockets."""
    below = len(os.fsencode(ray_folder())) - len(os.fsencode(private_folder().parent))
    return _LONGEST_SOCKET - _IN_FOLDER - below


def make_ray_folder() -> str:
    """Return the path of `ray_folder`, in a private folder that exists from now on.

    Raises:
        PlimsollError: There is such a folder, and others may use it.
        OSError: It cannot be made.
    """
    private = private_folder()
    private.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = private.lstat()
    mode = stat.S_IMODE(found.st_mode)
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or mode & 0o077:
        raise PlimsollError(
            f"Ray's folder {private} belongs to user {found.st_uid} and has mode {mode:o}. Others "
            "could read the run's data there, or stand in for Ray. Remove it, or set RAY_TMPDIR to "
            "a short path of your own."
        )
    return str(ray_folder())


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
