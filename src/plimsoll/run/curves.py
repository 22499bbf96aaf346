"""The curves of a run as one picture: rewards, KL, losses, and where the time went."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from plimsoll.errors import PlimsollError
from plimsoll.run.files import whole_file
from plimsoll.run.rows import Row, read_rows

# Okabe and Ito's colours, which people with colour blindness can tell apart; yellow is too pale
# for a line on white.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#999999")
_COLUMNS = 2
_MARKED_POINTS = 40
_MOST_COLUMNS = 1000
_PANEL_INCHES = (5.6, 3.2)


@dataclass(frozen=True)
class Panel:
    """One set of axes.

    names: the metrics to draw; a name that ends in `/` stands for all metrics that begin so.
    unit: the label of the vertical axis.
    stacked: draw areas that add up, instead of lines.
    """

    title: str
    names: tuple[str, ...]
    unit: str
    stacked: bool = False


SECONDS_PANEL = Panel("Time of a step by phase", ("seconds/",), "seconds", stacked=True)
PPO_PANELS = (
    Panel("Reward", ("reward", "reward/"), "per response"),
    Panel("Held out", ("eval/",), "per response or token"),
    Panel("KL from the reference", ("kl",), "nats per response"),
    Panel("Policy loss", ("policy_loss",), "per token"),
    Panel("Value loss", ("value_loss",), "per token"),
    SECONDS_PANEL,
)
ALL_PANELS = (
    Panel("Loss", ("loss",), "nats per token or pair"),
    Panel("Accuracy on pairs", ("accuracy",), "share"),
    Panel("Reward margin of pairs", ("rewards/margin",), "per pair"),
    *(panel for panel in PPO_PANELS if panel is not SECONDS_PANEL),
    Panel("Memory at its fullest", ("memory_bytes/",), "bytes"),
    Panel("Speed", ("tokens_per_second",), "tokens/s"),
    SECONDS_PANEL,
)
"""Those of every job."""


def has_curves(rows: Sequence[Row], panels: Sequence[Panel]) -> bool:
    """Whether there is anything to draw."""
    return any(_series(rows, panel) for panel in panels)


def draw_curves(
    metrics: Path | Sequence[Row], output_png: Path, panels: Sequence[Panel] = PPO_PANELS
) -> None:
    """Draw metrics (a metrics.jsonl, or its rows) over steps. Panels without data are left out.

    Raises PlimsollError where there is nothing at all to draw.
    """
    rows = read_rows(metrics) if isinstance(metrics, Path) else metrics
    drawn = [(panel, series) for panel in panels if (series := _series(rows, panel))]
    if not drawn:
        raise PlimsollError(
            f"No curves to draw for {output_png}: no row of {len(rows)} holds any of the metrics "
            f"{', '.join(name for panel in panels for name in panel.names)}. Run at least one step."
        )
    steps = [row["step"] for row in rows]
    first, last = min(steps), max(steps)
    lines = math.ceil(len(drawn) / _COLUMNS)
    width, height = _PANEL_INCHES
    figure = Figure(figsize=(width * min(len(drawn), _COLUMNS), height * lines), layout="tight")
    canvas = FigureCanvasAgg(figure)
    for place, (panel, series) in enumerate(drawn, start=1):
        axes = figure.add_subplot(lines, min(len(drawn), _COLUMNS), place)
        _draw(axes, panel, series)
        axes.set_xlim(first - 0.5, last + 0.5)
    with whole_file(output_png) as partial:
        canvas.print_figure(partial, format="png", dpi=120)


def _series(rows: Sequence[Row], panel: Panel) -> dict[str, dict[int, float]]:
    """By metric, the value of each step that has one."""
    names = dict.fromkeys(name for row in rows for name in row)
    found = {
        name: {row["step"]: value for row in rows if (value := row.get(name)) is not None}
        for name in names
        if _belongs(name, panel)
    }
    return {name: values for name, values in found.items() if values}


def _belongs(name: str, panel: Panel) -> bool:
    return any(
        name.startswith(wanted) if wanted.endswith("/") else name == wanted
        for wanted in panel.names
    )


def _draw(axes: Axes, panel: Panel, series: Mapping[str, Mapping[int, float]]) -> None:
    if panel.stacked:
        _draw_stacked(axes, series)
    else:
        _draw_lines(axes, series)
    axes.set_title(panel.title, loc="left", fontsize=11, fontweight="bold")
    axes.set_xlabel("step")
    axes.set_ylabel(panel.unit)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=8, min_n_ticks=1))
    axes.grid(axis="y", color="#dddddd", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    if panel.stacked or len(series) > 1:
        axes.legend(frameon=False, fontsize=8, ncols=3 if panel.stacked else 1)


def _draw_lines(axes: Axes, series: Mapping[str, Mapping[int, float]]) -> None:
    for (name, values), colour in zip(series.items(), cycle(_COLOURS), strict=False):
        marker = "o" if len(values) <= _MARKED_POINTS else ""
        steps, heights = list(values), list(values.values())
        axes.plot(steps, heights, label=name, color=colour, marker=marker, markersize=3.5)


def _draw_stacked(axes: Axes, series: Mapping[str, Mapping[int, float]]) -> None:
    """A column per step, one unit wide, so that a single step is seen as well; of more steps than a
    picture has room for, a column for the mean of several."""
    steps = range(min(map(min, series.values())), max(map(max, series.values())) + 1)
    starts = np.arange(0, len(steps), -(-len(steps) // _MOST_COLUMNS))
    ends = np.append(starts[1:], len(steps))
    edges = np.append(starts, len(steps)) + steps[0] - 0.5
    floor = np.zeros(len(starts))
    for (name, values), colour in zip(series.items(), cycle(_COLOURS), strict=False):
        heights = np.array([values.get(step, 0.0) for step in steps])
        top = floor + np.add.reduceat(heights, starts) / (ends - starts)
        label = name.rpartition("/")[2]
        axes.stairs(top, edges, baseline=floor, fill=True, color=colour, label=label, alpha=0.85)
        floor = top
    axes.set_ylim(0, 1.35 * max(float(floor.max()), 1e-9))  # the legend stands above the columns
