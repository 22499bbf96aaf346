"""The page as one HTML file that needs no other file.

Style, scripts and, if the page is frozen, its data are inside. A content policy forbids all other
scripts and addresses.
"""

from __future__ import annotations

import re
from base64 import b64encode
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import sha256
from importlib.resources import files
from typing import Any

from jinja2 import Environment, StrictUndefined

from plimsoll.run.numbers import strict_json

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
    ("dom", "source", "palette", "memory", "controls", "answers", "plan"),
    ("page.css", "plan.css"),
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
        data=None if data is None else _to_script_json(data),
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
    hashes = " ".join(map(_hash, scripts))
    return "; ".join(
        [
            "default-src 'none'",
            f"script-src {hashes}",
            f"style-src {_hash(style)}",
            "img-src data:",
            "connect-src 'self'" if live else "connect-src 'none'",
            "base-uri 'none'",
            "form-action 'none'",
        ]
    )


def _hash(text: str) -> str:
    return f"'sha256-{b64encode(sha256(text.encode()).digest()).decode()}'"


def _to_script_json(data: Mapping[str, Any]) -> str:
    text = strict_json(data)
    return text.replace("<", "\\u003c")


def _asset(name: str) -> str:
    return files("plimsoll.page").joinpath("static", name).read_text(encoding="utf-8").strip()
