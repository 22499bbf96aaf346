"""The report of a run as one HTML file that needs nothing beside it."""

from __future__ import annotations

import tempfile
from base64 import b64encode
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from plimsoll.run.comparison import Comparison
from plimsoll.run.curves import ALL_PANELS, draw_curves, has_curves
from plimsoll.run.numbers import gigabytes_text
from plimsoll.run.rows import Row

COLUMNS = ("process", "phase", "memory", "predicted", "measured", "over", "seconds")

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem }
table { border-collapse: collapse } td, th { padding: .15rem .8rem; text-align: left }
td:nth-child(n+4), th:nth-child(n+4) { text-align: right; font-variant-numeric: tabular-nums }
tr:nth-child(even) { background: #f3f5f7 } img { max-width: 100% } pre { overflow-x: auto }
"""


@dataclass(frozen=True)
class Page:
    """What a report shows. remarks: what is to be said first. metrics: the rows of metrics.jsonl.
    calibration: of a reward model, as PNG. drawing: the plan as SVG. Both where there is one.
    config: YAML."""

    title: str
    remarks: Sequence[str]
    comparisons: Sequence[Comparison]
    metrics: Sequence[Row]
    calibration: bytes | None
    drawing: str | None
    config: str


def report_page(page: Page) -> str:
    """The whole file."""
    title = escape(f"Plimsoll: {page.title}")
    body = "\n".join(_body(page))
    return (
        f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        f"<style>{_STYLE}</style></head>\n<body><h1>{title}</h1>\n{body}\n</body></html>\n"
    )


def _body(page: Page) -> Iterator[str]:
    yield from (f"<p>{escape(remark)}</p>" for remark in page.remarks)
    yield "<h2>Memory: predicted and measured</h2>"
    yield _table(page.comparisons)
    if has_curves(page.metrics, ALL_PANELS):
        yield "<h2>Curves</h2>"
        yield _image("png", _curves(page.metrics), "metrics over steps")
    if page.calibration is not None:
        yield "<h2>Calibration on held-out data</h2>"
        yield _image("png", page.calibration, "observed share over predicted probability")
    if page.drawing is not None:
        yield "<h2>The plan</h2>"
        yield _image("svg+xml", page.drawing.encode(), "planned memory by phase")
    yield f"<h2>Config</h2><pre>{escape(page.config)}</pre>"


def _table(comparisons: Sequence[Comparison]) -> str:
    rows = [_row("th", COLUMNS), *(_row("td", cells(one)) for one in comparisons)]
    return f"<table>{''.join(rows)}</table>"


def _row(tag: str, texts: Sequence[str]) -> str:
    return f"<tr>{''.join(f'<{tag}>{escape(text)}</{tag}>' for text in texts)}</tr>"


def cells(one: Comparison) -> tuple[str, ...]:
    """A comparison as a person reads it; what the plan does not say stays empty."""
    return (
        one.process,
        one.phase,
        one.measure,
        "" if one.predicted is None else gigabytes_text(one.predicted),
        gigabytes_text(one.measured),
        "" if one.over is None else f"{one.over:+.0%}",
        f"{one.seconds:.1f}",
    )


def _curves(metrics: Sequence[Row]) -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        picture = Path(folder) / "curves.png"
        draw_curves(metrics, picture, ALL_PANELS)
        return picture.read_bytes()


def _image(kind: str, data: bytes, what: str) -> str:
    return f'<img alt="{what}" src="data:image/{kind};base64,{b64encode(data).decode()}">'
