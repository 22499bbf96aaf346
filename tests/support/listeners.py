"""What processes listen to."""

from __future__ import annotations

from collections.abc import Iterable

import psutil


def listening(processes: Iterable[psutil.Process] | None = None) -> set[tuple[str, int]]:
    """Addresses and ports of processes; default: this one and all that it has started."""
    this = psutil.Process()
    return {
        (connection.laddr.ip.removeprefix("::ffff:"), connection.laddr.port)
        for process in processes or (this, *this.children(recursive=True))
        for connection in process.net_connections("inet")
        if connection.status == psutil.CONN_LISTEN
    }
