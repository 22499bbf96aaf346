"""A page as one HTML file that needs no other file, and the server of a page.

Style, scripts and, if the page is frozen, its data are inside the file. A content policy forbids
all other scripts and addresses.

The server's address contains a random token. Requests without the token, and on loopback those for
another host, are answered with 404.
"""

from __future__ import annotations

import os
import re
import secrets
import socket
from base64 import b64encode
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from hashlib import sha256
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jinja2 import Environment, StrictUndefined

from plimsoll.errors import ConfigError, PlimsollError
from plimsoll.machine.faults import fault_point
from plimsoll.machine.guard import Guard, bind_socket, is_addressed, sent_token, url_of
from plimsoll.run.numbers import finite_json, strict_json

if TYPE_CHECKING:
    from starlette.applications import Starlette


_UPLOT = "uplot/uPlot.iife.min.js"


@dataclass(frozen=True)
class View:
    """The components of a page, as names of files in `static/`."""

    modules: tuple[str, ...]
    """Our scripts, in the order in which they depend on each other."""
    styles: tuple[str, ...] = ("page.css",)
    libraries: tuple[str, ...] = ()
    """Scripts of other projects."""


RUNS = View(
    (
        *("dom", "source", "palette", "chart_data", "charts", "progress", "tables", "memory"),
        *("tokens", "samples", "main"),
    ),
    ("uplot/uPlot.min.css", "page.css"),
    (_UPLOT,),
)
PLAN = View(
    ("dom", "source", "palette", "memory", "controls", "answers", "plan"), ("page.css", "plan.css")
)


def render_page(title: str, data: Mapping[str, Any] | None, view: View) -> str:
    """Return the page as the text of one file.

    `title` is the title of the window. `data` has the replies of a frozen page by request; it is
    None for a page that asks its server.
    """
    style = "\n".join(map(_asset, view.styles))
    libraries, modules = [*map(_asset, view.libraries)], join_scripts(view)
    environment = Environment(autoescape=True, undefined=StrictUndefined)
    text: str = environment.from_string(_asset("index.html.j2")).render(
        title=title,
        policy=policy(style, [*libraries, modules], live=data is None),
        style=style,
        libraries=libraries,
        script=modules,
        data=None if data is None else strict_json(data).replace("<", "\\u003c"),
    )
    return text


def join_scripts(view: View) -> str:
    """Join the modules of a view into one script, in one scope."""
    text = "\n".join(_asset(f"{name}.js") for name in view.modules)
    return re.sub(r"^import [^;]*;\n|^export ", "", text, flags=re.M)


def policy(style: str, scripts: list[str], *, live: bool) -> str:
    """Return the Content-Security-Policy.

    It allows only this style and these scripts, and requests to its server if the page is live.
    """
    hashes, server = " ".join(map(_hash, scripts)), "self" if live else "none"
    return (
        f"default-src 'none'; script-src {hashes}; style-src {_hash(style)}; img-src data:; "
        f"connect-src '{server}'; base-uri 'none'; form-action 'none'"
    )


def _hash(text: str) -> str:
    return f"'sha256-{b64encode(sha256(text.encode()).digest()).decode()}'"


def _asset(name: str) -> str:
    return files("plimsoll.page").joinpath("static", name).read_text(encoding="utf-8").strip()


Query = Mapping[str, str]
AnswerFunction = Callable[[str, Query], Any]
"""Takes the name and query of a request, and returns JSON.

Raises PlimsollError if there is no answer.
"""

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
"""The type of figures in Prometheus' text format."""
_NOTHING_HERE = "Nothing here. The page's command printed its whole address, with a token.\n"
_HEADERS = {
    "Cache-Control": "no-store",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}


FiguresFunction = Callable[[], str]
"""Returns figures in Prometheus' text format."""


def read_token(path: Path) -> str:
    """Return the token in a file; write a new one, for the owner alone, if there is no file.

    Raises ConfigError if the file cannot be used, or holds no token.
    """
    try:
        with suppress(FileExistsError):
            descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
            with os.fdopen(descriptor, "w") as file:
                file.write(f"{secrets.token_urlsafe(16)}\n")
        with path.open(encoding="utf-8") as file:
            mode = os.fstat(file.fileno()).st_mode
            token = file.read().strip()
    except (OSError, ValueError) as error:
        raise ConfigError(f"--token-file: {path} cannot be used: {error}.") from error
    if mode & 0o077:
        raise ConfigError(
            f"--token-file: {path} has the mode {mode & 0o777:o}, so others of this machine may "
            f"read the token and with it the page. Run `chmod 600 {path}`, or remove the file, and "
            "a new one is written."
        )
    if not re.fullmatch(r"[\w-]{16,}", token, re.ASCII):
        raise ConfigError(
            f"--token-file: {path} holds no token, which is at least 16 letters, digits, - and _. "
            "Remove the file, and a new one is written."
        )
    return token


def serve(
    text: str,
    answer: AnswerFunction,
    host: str,
    port: int,
    figures: FiguresFunction | None = None,
    token: str | None = None,
) -> None:
    """Serve an HTML page and its data until Ctrl-C. Raises ConfigError if the address is taken.

    `figures` are served for Prometheus. `token`: default: a new one.
    """
    guard = Guard(token or secrets.token_urlsafe(16), host)
    with bind_socket(host, port) as listening:
        print(f"{url_of(host, listening)}/{guard.token}/  (Ctrl-C ends it)", flush=True)
        run_app(make_app(text, answer, guard, figures), listening)


def run_app(app: Starlette, listening: socket.socket) -> None:
    """Run an application on a socket until it is interrupted."""
    import uvicorn

    uvicorn.Server(uvicorn.Config(app, log_level="warning")).run(sockets=[listening])


def make_app(
    text: str, answer: AnswerFunction, guard: Guard, figures: FiguresFunction | None = None
) -> Starlette:
    """Return a web application with the page at /TOKEN/ and its data at /TOKEN/data/NAME.

    With `figures` they are at /metrics, for requests with the header `Authorization: Bearer TOKEN`.
    """
    from starlette.applications import Starlette
    from starlette.exceptions import HTTPException
    from starlette.middleware import Middleware
    from starlette.middleware.gzip import GZipMiddleware
    from starlette.requests import Request
    from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response
    from starlette.routing import Route

    def check(request: Request, token: str) -> None:
        if not (is_addressed(request.headers, guard.host) and guard.fits(token)):
            raise HTTPException(404)

    def show_figures(request: Request) -> Response:
        check(request, sent_token(request.headers))
        if figures is None:
            raise HTTPException(404)
        return Response(figures(), headers={**_HEADERS, "Content-Type": CONTENT_TYPE})

    def show_page(request: Request) -> HTMLResponse:
        check(request, request.path_params["token"])
        return HTMLResponse(text, headers=_HEADERS)

    def data(request: Request) -> JSONResponse:
        check(request, request.path_params["token"])
        try:
            fault_point("page.answer")
            reply = answer(request.path_params["name"], request.query_params)
        except (PlimsollError, OSError) as error:
            return JSONResponse({"detail": str(error)}, 404, headers=_HEADERS)
        return JSONResponse(finite_json(reply), headers=_HEADERS)

    def nothing_here(request: Request, error: Exception) -> PlainTextResponse:
        return PlainTextResponse(_NOTHING_HERE, 404)

    routes = [
        Route("/metrics", show_figures),
        Route("/{token}/", show_page),
        Route("/{token}/data/{name}", data),
    ]
    return Starlette(
        routes=routes,
        middleware=[Middleware(GZipMiddleware, compresslevel=3)],
        exception_handlers={404: nothing_here},
    )
