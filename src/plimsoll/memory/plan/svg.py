"""A plan as a picture: stacked items over the phases under the load line, as plain SVG text."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from html import escape
from math import floor, log10

from plimsoll.memory.contents.stores import Store, Use
from plimsoll.run.counting import gigabytes
from plimsoll.timeline.items import KINDS, Kind

_WIDTH, _PANEL = 900, 380
_LEFT, _RIGHT, _TOP, _BOTTOM = 70, 680, 60, 330
_LEGEND = 190
_GAP, _FIGURE = 5, 13
"""Of a figure from what it stands on, and its height."""
_COLOURS: Mapping[Kind, str] = dict(
    zip(
        KINDS,
        (
            "#4477aa",
            "#66ccee",
            "#228833",
            "#ccbb44",
            "#bbbbbb",
            "#aa3377",
            "#ee7733",
            "#555555",
        ),
        strict=True,
    )
)
"""Of Paul Tol's bright and vibrant schemes, told apart by colour-blind eyes too."""


def draw_svg(title: str, stores: Sequence[Store]) -> str:
    """One panel for each store, below one another."""
    height = 40 + _PANEL * len(stores)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{height}" '
        f'viewBox="0 0 {_WIDTH} {height}" font-family="sans-serif" font-size="13" fill="#222222">',
        f'<rect width="{_WIDTH}" height="{height}" fill="#ffffff"/>',
        _text(_LEFT, 28, title, size=17, weight="bold"),
    ]
    for i, store in enumerate(stores):
        lines.append(f'<g transform="translate(0 {40 + i * _PANEL})">')
        lines += _panel(store)
        lines.append("</g>")
    return "\n".join([*lines, "</svg>"]) + "\n"


def _panel(store: Store) -> Iterator[str]:
    top = 1.08 * max(store.peak.bytes, store.capacity or 0)
    yield _text(_LEFT, 28, store.name, size=15, weight="bold")
    yield from _axis(top)
    step = (_RIGHT - _LEFT) / len(store.phases)
    for i, use in enumerate(store.phases):
        middle, width = _LEFT + (i + 0.5) * step, min(64.0, 0.7 * step)
        yield from _bar(use, middle, width, top, store.capacity)
    if store.capacity is not None:
        yield from _load_line(store.capacity, top)
    yield from _legend(store.peak)


def _axis(top: float) -> Iterator[str]:
    for tick in _ticks(top):
        y = _y(tick, top)
        yield f'<path d="M{_LEFT} {y:.1f}H{_RIGHT}" stroke="#dddddd"/>'
        yield _text(_LEFT - 8, y + 4, f"{tick / 1e9:g}", anchor="end")
    yield _text(_LEFT - 8, _TOP - 12, "GB", anchor="end")
    yield f'<path d="M{_LEFT} {_BOTTOM}H{_RIGHT}" stroke="#222222"/>'


def _ticks(top: float) -> list[float]:
    """Four to nine round numbers from 0 on."""
    least = top / 8
    magnitude = 10.0 ** floor(log10(least))
    step = next(n * magnitude for n in (1, 2, 5, 10) if n * magnitude >= least)
    return [i * step for i in range(int(top / step) + 1)]


def _bar(use: Use, middle: float, width: float, top: float, capacity: int | None) -> Iterator[str]:
    filled = 0
    for kind, size in use.stacks.items():
        if size:
            y, below = _y(filled + size, top), _y(filled, top)
            note = escape(f"{kind}: {gigabytes(size)} GB")
            yield (
                f'<rect x="{middle - width / 2:.1f}" y="{y:.1f}" width="{width:.1f}" '
                f'height="{below - y:.1f}" fill="{_COLOURS[kind]}"><title>{note}</title></rect>'
            )
        filled += size
    yield _text(middle, _above(filled, top, capacity), gigabytes(filled), anchor="middle")
    yield _text(middle, _BOTTOM + 18, use.moment.phase, anchor="middle")
    instant = use.moment.instant.removeprefix("forward_")  # the name does not fit below a bar
    yield _text(middle, _BOTTOM + 34, instant, anchor="middle", size=11)


def _above(size: int, top: float, capacity: int | None) -> float:
    """Return the height at which the figure of a bar stands: on the bar, or, where the load line
    would cross the figure there, on the line."""
    bar = _y(size, top)
    if capacity is None:
        return bar - _GAP
    line = _y(capacity, top)
    return (line if 0 <= bar - line <= _GAP + _FIGURE else bar) - _GAP


def _load_line(capacity: int, top: float) -> Iterator[str]:
    y = _y(capacity, top)
    yield f'<path d="M{_LEFT} {y:.1f}H{_RIGHT + 12}" stroke="#cc0000" stroke-width="2.5"/>'
    label = f"load line {gigabytes(capacity)}"
    above_legend = min(y + 4, _LEGEND - 30)
    yield _text(_RIGHT + 18, above_legend, label, colour="#cc0000", weight="bold")


def _legend(peak: Use) -> Iterator[str]:
    yield _text(_RIGHT + 18, _LEGEND, f"at the peak, in {peak.moment.phase}:", size=12)
    shown = [(kind, size) for kind, size in peak.stacks.items() if size]
    for i, (kind, size) in enumerate(reversed(shown)):
        y = _LEGEND + 20 + 17 * i
        yield (
            f'<rect x="{_RIGHT + 18}" y="{y - 11}" width="13" height="13" fill="{_COLOURS[kind]}"/>'
        )
        yield _text(_RIGHT + 38, y, f"{kind} {gigabytes(size)}", size=12)


def _y(size: float, top: float) -> float:
    return _BOTTOM - (_BOTTOM - _TOP) * size / top


def _text(
    x: float,
    y: float,
    text: str,
    *,
    anchor: str = "start",
    size: int = 13,
    weight: str = "normal",
    colour: str = "#222222",
) -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}" '
        f'font-weight="{weight}" fill="{colour}">{escape(text)}</text>'
    )
