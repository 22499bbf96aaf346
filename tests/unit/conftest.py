"""A hub of the tests' own, as a server of this machine: the real one cannot be asked here."""

from __future__ import annotations

from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import ClassVar

import pytest
from huggingface_hub import constants

from plimsoll.machine import local_host
from plimsoll.machine.hardware import parse_cluster
from plimsoll.resolve import decisions
from plimsoll.shapes import known_models as looking


class Hub(BaseHTTPRequestHandler):
    """Answers as the hub does, for the names in `has`, and with `trouble` where that is set."""

    has: ClassVar[set[str]] = set()
    trouble: ClassVar[int | None] = None
    asked: ClassVar[list[str]] = []

    def do_HEAD(self) -> None:
        self.send_response(200)
        self.end_headers()

    def do_GET(self) -> None:
        name = self.path.removeprefix("/api/models/").removeprefix("/api/datasets/")
        if name != self.path:  # not what the library asks for itself
            self.asked.append(name)
        self.send_response(self.trouble or (200 if name in self.has else 404))
        if self.trouble is None and name not in self.has:
            self.send_header("X-Error-Code", "RepoNotFound")
        self.end_headers()
        self.wfile.write(b'{"id": "%b"}' % name.encode())

    def log_message(self, *_: object) -> None:
        """Nothing."""


@pytest.fixture(scope="session", autouse=True)
def _cpu_with_bfloat16() -> Iterator[None]:
    """Plans and figures of these tests are of a CPU that multiplies bfloat16, on every machine."""
    with pytest.MonkeyPatch.context() as patch:
        for asks in (decisions, local_host):
            patch.setattr(asks, "multiplies_bfloat16", lambda: True)
        yield


@pytest.fixture(scope="module", autouse=True)
def _machine_with_a_card(request: pytest.FixtureRequest) -> Iterator[None]:
    """Plans of tests/unit/memory are for the cards that each names, whatever this machine has:
    there `cluster.device: auto` is cuda, and a plan without cards is one on the CPU."""
    [card] = parse_cluster("80GB", 1, None).node.cards
    with pytest.MonkeyPatch.context() as patch:
        if request.path.parent.name == "memory":
            patch.setattr(decisions, "_cards_here", lambda: (card,))
        yield


@pytest.fixture
def no_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without a network, whose cache is empty."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")  # nobody listens there
    monkeypatch.delenv("HF_DATASETS_CACHE", raising=False)
    looking._connection_error.cache_clear()


@pytest.fixture
def hub(no_hub: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Hub]]:
    """A hub that answers."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setattr(Hub, "has", set())
    monkeypatch.setattr(Hub, "trouble", None)
    monkeypatch.setattr(Hub, "asked", [])
    yield Hub
    server.shutdown()
    server.server_close()
    looking._connection_error.cache_clear()
