"""Addresses at which no Ray cluster is."""

from __future__ import annotations

import socket
from threading import Thread

import pytest

from plimsoll.cluster.ray import RayCluster
from plimsoll.cluster.ray_access import check_reachable
from plimsoll.config.cluster import ClusterConfig
from plimsoll.errors import ConfigError
from plimsoll.machine.host import free_port


@pytest.mark.parametrize("address", ["127.0.0.1:{port}", "nonsense", "127.0.0.1:x"])
def test_a_wrong_address_is_refused_at_once(address: str) -> None:
    address = address.format(port=free_port())
    with pytest.raises(ConfigError) as caught:
        RayCluster(ClusterConfig(address=address), (), threads=1, device="cpu")
    assert str(caught.value).startswith("cluster.address: ") and repr(address) in str(caught.value)


@pytest.mark.parametrize("answer", [b"HTTP/1.1 400 Bad Request\r\n\r\n", b"SSH-2.0-x\r\n", b""])
def test_another_server_at_the_address_is_refused(answer: bytes) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(10)
        Thread(target=_answer, args=(server, answer), daemon=True).start()
        with pytest.raises(OSError, match="not Ray's head"):
            check_reachable(f"127.0.0.1:{server.getsockname()[1]}")


def test_the_head_of_ray_is_accepted() -> None:
    """The first bytes that Ray 2.60's head answers with."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(10)
        settings = bytes([0, 0, 24, 4, 0, 0, 0, 0, 0]) + bytes(24)
        Thread(target=_answer, args=(server, settings), daemon=True).start()
        check_reachable(f"127.0.0.1:{server.getsockname()[1]}")


def _answer(server: socket.socket, answer: bytes) -> None:
    there, _ = server.accept()
    with there:
        there.recv(64)
        there.sendall(answer)
