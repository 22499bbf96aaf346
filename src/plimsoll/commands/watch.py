"""`plimsoll watch RUN...`: the page of runs, live.

    plimsoll watch runs/ppo runs/grpo

A thread reads on what the runs write; requests are answered from what has been read. The address
has a random word in it: who does not know it is told nothing.
"""

from __future__ import annotations

import importlib.util
import secrets
import socket
from collections.abc import Callable, Sequence
from pathlib import Path
from threading import Event, Thread
from typing import TYPE_CHECKING

from pyarrow import ArrowException

from plimsoll.errors import ConfigError, PlimsollError
from plimsoll.page.answers import answer
from plimsoll.page.html import page
from plimsoll.page.watched import Watched, watched
from plimsoll.run.directory import RunDirectory

if TYPE_CHECKING:
    from starlette.applications import Starlette

_PACKAGES = ("starlette", "uvicorn")
_EVERY = 0.25
"""Seconds between two looks at runs of which all has been read."""
_HEADERS = {
    "Cache-Control": "no-store",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}


def watch(paths: Sequence[Path], host: str, port: int) -> None:
    """Serve the page of these runs until it is interrupted.

    Raises ConfigError where one holds no run, or the address cannot be had.
    """
    missing = [name for name in _PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(
            f"plimsoll watch needs {' and '.join(missing)}, which is not installed. Install "
            f"plimsoll-rl with its extra `serve`, `cpu` or `gpu`. `plimsoll report` needs neither."
        )
    import uvicorn

    for path in paths:
        refuse_no_run(path)
    reader = Reader(watched(paths))
    token = secrets.token_urlsafe(16)
    with bound(host, port) as place, reader:
        shown = f"[{host}]" if ":" in host else host
        print(f"http://{shown}:{place.getsockname()[1]}/{token}/  (Ctrl-C ends it)", flush=True)
        settings = uvicorn.Config(app(lambda: reader.runs, token), log_level="warning")
        uvicorn.Server(settings).run(sockets=[place])


def refuse_no_run(path: Path) -> None:
    """Raises ConfigError where a directory holds no run; the message names those below it."""
    if not path.is_dir():
        raise ConfigError(f"{path} is no directory. Give the run.directory of a run.")
    run = RunDirectory(path)
    if not (run.config_path.is_file() or run.metrics_path.is_file()):
        below = sorted(str(one.parent) for one in path.glob("*/config.yaml"))
        near = f" Below it are: {', '.join(below[:8])}." if below else ""
        raise ConfigError(
            f"{path} holds no run: it has no config.yaml, which a run writes when it begins. "
            f"Give the run.directory of a run.{near}"
        )


class Reader:
    """The runs as far as they have been read; a context manager, within which a thread reads on.

    It consumes what the runs write to their directories, waits for nothing else, looks four times a
    second (at once where more is there), and produces `runs`. It ends with the block.
    """

    def __init__(self, runs: tuple[Watched, ...]) -> None:
        self.runs = runs
        self._stop = Event()
        self._thread = Thread(target=self._read, name="reader", daemon=True)

    def __enter__(self) -> Reader:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        self._thread.join()

    def _read(self) -> None:
        while not self._stop.is_set():
            before = self.runs
            self.runs = tuple(run.look() for run in before)
            grown = [run.version for run in before] != [run.version for run in self.runs]
            self._stop.wait(0.0 if grown else _EVERY)


def app(runs: Callable[[], Sequence[Watched]], token: str) -> Starlette:
    """The page at /TOKEN/, and what it asks for at /TOKEN/data/NAME. runs: as they are now."""
    from starlette.applications import Starlette
    from starlette.exceptions import HTTPException
    from starlette.middleware import Middleware
    from starlette.middleware.gzip import GZipMiddleware
    from starlette.requests import Request
    from starlette.responses import HTMLResponse, JSONResponse
    from starlette.routing import Route

    def check(request: Request) -> None:
        if not secrets.compare_digest(request.path_params["token"].encode(), token.encode()):
            raise HTTPException(404)

    def shown(request: Request) -> HTMLResponse:
        check(request)
        title = ", ".join(run.name for run in runs())
        return HTMLResponse(page(title, None), headers=_HEADERS)

    def data(request: Request) -> JSONResponse:
        check(request)
        try:
            found = answer(runs(), request.path_params["name"], request.query_params)
        except (PlimsollError, OSError, ArrowException) as error:
            return JSONResponse({"detail": str(error)}, 404, headers=_HEADERS)
        return JSONResponse(found, headers=_HEADERS)

    routes = [Route("/{token}/", shown), Route("/{token}/data/{name}", data)]
    return Starlette(routes=routes, middleware=[Middleware(GZipMiddleware, compresslevel=3)])


def bound(host: str, port: int) -> socket.socket:
    """A socket that listens there. Raises ConfigError where it cannot be had."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family)
    except OSError as error:
        raise ConfigError(
            f"{host}:{port} cannot be served at: {error.strerror}. Give another --port, or 0 for a "
            f"free one."
        ) from error
