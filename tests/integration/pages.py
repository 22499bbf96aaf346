"""Pages, served and opened in a real Chromium. Needs the package playwright, and a Chromium of the
system."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Thread
from typing import Any

import pytest

from plimsoll.machine.guard import Guard, bind_socket
from plimsoll.page.serve import AnswerFunction, make_app

playwright = pytest.importorskip(
    "playwright.sync_api", reason="playwright is not installed: `make clean test`"
)
uvicorn = pytest.importorskip("uvicorn", reason="the extra `serve` is not installed")
CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), ""
)
needs_chromium = pytest.mark.skipif(not CHROMIUM, reason="no chromium: `apt-get install chromium`")

expect = playwright.expect
Page = Any


@contextmanager
def started() -> Iterator[Any]:
    """Chromium itself."""
    with playwright.sync_playwright() as found:
        browser = found.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@contextmanager
def opened(chromium: Any, address: str, ready: str, **settings: Any) -> Iterator[Page]:
    """A page, which must have no error, complaint or question when it is closed. ready: what is
    there once it is drawn."""
    said: list[str] = []
    page = chromium.new_context(viewport={"width": 1280, "height": 900}, **settings).new_page()
    page.on("console", lambda message: said.append(f"{message.type}: {message.text}"))
    page.on("pageerror", lambda error: said.append(str(error)))
    page.on("dialog", lambda dialog: said.append(f"dialog {dialog.message}"))
    page.goto(address)
    page.locator(ready).first.wait_for()
    yield page
    page.close()
    assert said == []


@contextmanager
def served(text: str, answer: AnswerFunction) -> Iterator[str]:
    """The address of a live page."""
    with bind_socket("127.0.0.1", 0) as place:
        settings = uvicorn.Config(
            make_app(text, answer, Guard("word", "127.0.0.1")), log_level="warning"
        )
        server = uvicorn.Server(settings)
        thread = Thread(target=server.run, kwargs={"sockets": [place]}, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{place.getsockname()[1]}/word/"
        server.should_exit = True
        thread.join()
