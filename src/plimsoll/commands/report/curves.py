"""The curves of a run as a picture: its panels as one PNG."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import cycle
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray

from plimsoll.errors import PlimsollError
from plimsoll.run.files import whole_file
from plimsoll.run.json_lines import Row
from plimsoll.spec.job import Panel

# Okabe and Ito's colours, which people with colour blindness can tell apart; without yellow and
# black, and with a lighter blue.
_COLOURS = ("#2389CC", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#999999")
_INK = "#222222"
_STYLE = {f"{what}color": _INK for what in ("text.", "axes.label", "axes.edge", "xtick.", "ytick.")}
_COLUMNS = 2
_MARKED_POINTS = 20
_MOST_POINTS = 500
_PANEL_INCHES = (4.4, 2.8)


def draw_curves(rows: Sequence[Row], output_png: Path, panels: Sequence[Panel]) -> None:
    """Draw the panels over the steps of metrics. Those without data are left out.

    Raises PlimsollError where there is nothing at all to draw.
    """
    drawn = [panel for panel in panels if _has_data(rows, panel)]
    if not drawn:
        raise PlimsollError(
            f"No curves to draw for {output_png}: no row of {len(rows)} holds any of the metrics "
            f"{', '.join(name for panel in panels for name in panel.series)}. Run at least one "
            "step."
        )
    columns = min(len(drawn), _COLUMNS)
    lines = math.ceil(len(drawn) / columns)
    width, height = _PANEL_INCHES
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(width * columns, height * lines), layout="tight")
        canvas = FigureCanvasAgg(figure)
        for place, panel in enumerate(drawn, start=1):
            _draw(figure.add_subplot(lines, columns, place), rows, panel)
        with whole_file(output_png) as partial:
            canvas.print_figure(partial, format="png", dpi=150)


def _has_data(rows: Sequence[Row], panel: Panel) -> bool:
    return any(row.get(name) is not None for row in rows for name in panel.series)


def _draw(axes: Axes, rows: Sequence[Row], panel: Panel) -> None:
    steps = [row["step"] for row in rows]
    first, last = min(steps), max(steps)
    together = -(-(last - first + 1) // _MOST_POINTS)
    if panel.stacked:
        _draw_stacked(axes, rows, panel, together)
    else:
        _draw_lines(axes, rows, panel, together)
    if panel.from_zero:
        axes.set_ylim(0, 1.1 * axes.get_ylim()[1])
    axes.set_xlim(first - 0.5, last + 0.5)
    axes.set_title(panel.title, loc="left", fontsize=11, fontweight="bold")
    axes.set_xlabel("step" if together == 1 else f"step (means of {together})")
    axes.set_ylabel(panel.unit)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=8, min_n_ticks=1))
    axes.grid(axis="y", color=_INK, alpha=0.15, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    if panel.stacked or len(panel.series) > 1:
        axes.legend(frameon=False, fontsize=8, ncols=3 if panel.stacked else 1)


def _draw_lines(axes: Axes, rows: Sequence[Row], panel: Panel, together: int) -> None:
    """A line for each metric; between its `_low` and `_high`, where it has them, a band."""
    for (name, label), colour in zip(panel.series.items(), cycle(_COLOURS), strict=False):
        points = [
            (row["step"], value, row.get(f"{name}_low"), row.get(f"{name}_high"))
            for row in rows
            if (value := row.get(name)) is not None
        ]
        if points:
            steps, values, low, high = _means(np.array(points, dtype=float), together).T
            marker = "o" if len(steps) <= _MARKED_POINTS else ""
            axes.plot(steps, values, label=label, color=colour, marker=marker, markersize=3, lw=1.4)
            axes.fill_between(steps, low, high, color=colour, alpha=0.2, linewidth=0)


def _means(points: NDArray[np.float64], together: int) -> NDArray[np.float64]:
    """Means over so many steps: of points, whose first column is the step. [points, columns]"""
    starts = np.unique(points[:, 0] // together, return_index=True)[1]
    counts = np.diff(np.append(starts, len(points)))
    return np.add.reduceat(points, starts) / counts[:, None]


def _draw_stacked(axes: Axes, rows: Sequence[Row], panel: Panel, together: int) -> None:
    """A column per step, one unit wide, so that a single step is seen as well; of more steps than a
    picture has room for, a column for the mean of several."""
    steps = range(min(row["step"] for row in rows), max(row["step"] for row in rows) + 1)
    starts = np.arange(0, len(steps), together)
    ends = np.append(starts[1:], len(steps))
    edges = np.append(starts, len(steps)) + steps[0] - 0.5
    floor = np.zeros(len(starts))
    for (name, label), colour in zip(panel.series.items(), cycle(_COLOURS), strict=False):
        values = {row["step"]: row.get(name) or 0.0 for row in rows}
        heights = np.array([values.get(step, 0.0) for step in steps])
        top = floor + np.add.reduceat(heights, starts) / (ends - starts)
        axes.stairs(top, edges, baseline=floor, fill=True, color=colour, label=label, alpha=0.85)
        floor = top
    axes.set_ylim(0, 1.35 * max(float(floor.max()), 1e-9))  # the legend stands above the columns
