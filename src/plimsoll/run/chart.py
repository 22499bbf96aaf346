"""The chart of a model's calibration as SVG text, which a page embeds."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

_WIDTH, _HEIGHT = 460, 320
_LEFT, _RIGHT, _TOP, _BOTTOM = 60, 440, 70, 270
_MODEL, _CALIBRATED = "#2389CC", "#D55E00"
"""Okabe and Ito's colours, which people with colour blindness can tell apart."""

Point = tuple[float, float]


def draw_calibration(title: str, points: Sequence[Point], notes: Sequence[str]) -> str:
    """Return a chart of observed shares by predicted probability, with the diagonal beside them.

    Args:
        title: stands above the chart.
        points: a predicted and an observed share each.
        notes: a text for each point, drawn above it.
    """
    elements = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{_HEIGHT}" '
        f'viewBox="0 0 {_WIDTH} {_HEIGHT}" font-family="sans-serif" font-size="12" fill="#222222">',
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="#ffffff"/>',
        _text(_LEFT, 20, title, weight="bold"),
        _text(_LEFT - 8, _TOP - 10, "observed share"),
        _text(_RIGHT, _BOTTOM + 38, "predicted probability", anchor="end"),
    ]
    for tick in (0, 0.2, 0.4, 0.6, 0.8, 1):
        x, y = _place((tick, tick))
        elements.append(_text(x, _BOTTOM + 18, f"{tick:g}", anchor="middle"))
        elements.append(f'<path d="M{_LEFT} {y:.1f}H{_RIGHT}" stroke="#dddddd"/>')
        elements.append(_text(_LEFT - 8, y + 4, f"{tick:g}", anchor="end"))
    for left, label, colour in ((60, "model", _MODEL), (127, "calibrated", _CALIBRATED)):
        elements.append(f'<rect x="{left}" y="30" width="10" height="10" fill="{colour}"/>')
        elements.append(_text(left + 14, 40, label))
    elements.append(_line(points, _MODEL, ""))
    for (x, y), note in zip(map(_place, points), notes, strict=True):
        elements.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{_MODEL}"/>')
        elements.append(_text(x, y - 8, note, anchor="middle"))
    elements.append(_line([(0, 0), (1, 1)], _CALIBRATED, ' stroke-dasharray="5 4"'))
    return "\n".join([*elements, "</svg>"]) + "\n"


def _place(point: Point) -> Point:
    """Return the place in the picture of a point between (0, 0) and (1, 1)."""
    return _LEFT + (_RIGHT - _LEFT) * point[0], _BOTTOM - (_BOTTOM - _TOP) * point[1]


def _line(points: Sequence[Point], colour: str, dashes: str) -> str:
    places = " L".join(f"{x:.1f} {y:.1f}" for x, y in map(_place, points))
    return f'<path d="M{places}" fill="none" stroke="{colour}" stroke-width="1.5"{dashes}/>'


def _text(x: float, y: float, text: str, *, anchor: str = "start", weight: str = "normal") -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" '
        f'font-weight="{weight}">{escape(text)}</text>'
    )
