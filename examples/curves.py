"""Curves and figures of metrics, before and after, of runs that are compared with each other.

    python examples/curves.py curves.svg eval/right "with a tool=runs/a" "without=runs/b"

After each label stands one run, or several that differ by their seed alone: then the curve is their
mean, its band the 95 % confidence interval of that (Student's), and so is the printed difference
between the first and the last evaluation. Of one run the band is the run's own interval.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from html import escape
from math import floor, log10
from pathlib import Path
from statistics import fmean

from plimsoll.algorithm.figures import mean_interval
from plimsoll.errors import ConfigError, PlimsollError
from plimsoll.run.directory import existing_run
from plimsoll.run.files import write_whole
from plimsoll.run.json_lines import JsonRow, read_rows

Runs = Sequence[Sequence[JsonRow]]
"""The rows of metrics of each."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command line; returns the exit code. arguments: default sys.argv[1:]."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("picture", type=Path, help="the SVG file that is written")
    parser.add_argument("metrics", help="of held-out rows, such as eval/reward, or METRIC,...")
    parser.add_argument("runs", nargs="+", help="LABEL=DIRECTORY, or with several DIRECTORY,...")
    options = parser.parse_args(arguments)
    try:
        labelled = dict(map(_labelled, options.runs))
        metrics = options.metrics.split(",")
        for label, runs in labelled.items():
            for metric in metrics:
                print(told(label, runs, metric))
        write_whole(options.picture, draw_charts(charts_of(labelled, metrics)))
    except PlimsollError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


def _labelled(text: str) -> tuple[str, Runs]:
    label, found, directories = text.partition("=")
    if not found:
        raise ConfigError(f"{text!r} has no label: write LABEL=DIRECTORY, as in sft=runs/sft.")
    return label, [read_rows(existing_run(Path(d)).metrics_path) for d in directories.split(",")]


def told(label: str, runs: Runs, metric: str) -> str:
    """The metric at the first and the last evaluation of each run, and what lies between."""
    ends = [(own[0], own[-1]) for run in runs if (own := _values(run, metric))]
    if len(ends) < len(runs):
        raise ConfigError(f"A run of {label!r} has no {metric} in its metrics.jsonl.")
    differences = [after - before for before, after in ends]
    interval = mean_interval(differences, range(len(ends)))
    each = ", ".join(f"{before:.3f} -> {after:.3f}" for before, after in ends)
    band = "" if interval is None else f", 95 % interval {interval[0]:+.3f} to {interval[1]:+.3f}"
    return f"{label}, {metric}: {each}; difference {fmean(differences):+.3f}{band}"


def _values(run: Sequence[JsonRow], metric: str) -> list[float]:
    return [row[metric] for row in run if row.get(metric) is not None]


def charts_of(labelled: Mapping[str, Runs], metrics: Sequence[str]) -> list[Chart]:
    """Return a chart for the reward and for each metric, with a line for each label."""
    titles = {"reward": "Reward in training"} | {m: f"{m} on held-out rows" for m in metrics}
    charts = []
    for name, title in titles.items():
        lines = [_line(label, runs, name) for label, runs in labelled.items()]
        charts.append(Chart(title, "step", "mean", [line for line in lines if line.points]))
    return [chart for chart in charts if chart.lines]


def _line(label: str, runs: Runs, name: str) -> ChartLine:
    """Return the mean of runs at each step, with its interval."""
    steps = sorted({row["step"] for run in runs for row in run})
    means = {
        s: _mean([row for run in runs for row in run if row["step"] == s], name) for s in steps
    }
    means = {step: mean for step, mean in means.items() if mean}
    intervals = [
        (step, mean[f"{name}_low"], mean[f"{name}_high"])
        for step, mean in means.items()
        if f"{name}_low" in mean
    ]
    return ChartLine(label, [(step, mean[name]) for step, mean in means.items()], intervals)


def _mean(rows: Sequence[JsonRow], name: str) -> Mapping[str, float]:
    """Over runs, with its interval; of a single run with the run's own."""
    if len(rows) == 1:
        keys = (name, f"{name}_low", f"{name}_high")
        return {key: rows[0][key] for key in keys if rows[0].get(key) is not None}
    values = _values(rows, name)
    if not values:
        return {}
    interval = mean_interval(values, range(len(values)))
    bounds = {} if interval is None else {f"{name}_low": interval[0], f"{name}_high": interval[1]}
    return {name: fmean(values)} | bounds


_WIDTH, _HEIGHT = 460, 320
_LEFT, _RIGHT, _TOP, _BOTTOM = 60, 440, 70, 270
_COLUMNS = 2
_MARKED_POINTS = 20
_COLOURS = ("#2389CC", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#999999")
"""Okabe and Ito's colours, which people with colour blindness can tell apart."""

Range = tuple[float, float]


@dataclass(frozen=True)
class ChartLine:
    """A line of a chart with its name in the legend."""

    label: str
    points: Sequence[tuple[float, float]]
    intervals: Sequence[tuple[float, float, float]] = ()
    """(x, low, high) of each point that has an interval; drawn as a band."""
    notes: Sequence[str] = ()
    """One text per point, drawn above it."""
    dashed: bool = False


@dataclass(frozen=True)
class Chart:
    """Lines drawn on the same two axes."""

    title: str
    x_label: str
    y_label: str
    lines: Sequence[ChartLine]
    x_range: Range | None = None
    y_range: Range | None = None
    """`x_range` and `y_range`: (low, high) of an axis; None for the range of the points."""

    @cached_property
    def x_ends(self) -> Range:
        """The lowest and the highest x of the horizontal axis."""
        return self.x_range or _widen([x for line in self.lines for x, _ in line.points])

    @cached_property
    def y_ends(self) -> Range:
        """The lowest and the highest y of the vertical axis."""
        values = [y for line in self.lines for _, y in line.points]
        ends = [end for line in self.lines for _, *bounds in line.intervals for end in bounds]
        return self.y_range or _widen([*values, *ends])


def draw_charts(charts: Sequence[Chart]) -> str:
    """Return the text of one SVG picture of all charts, with two charts in each row."""
    columns = min(len(charts), _COLUMNS)
    width, height = _WIDTH * columns, _HEIGHT * -(-len(charts) // columns)
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="12" fill="#222222">'
    )
    elements = [head, f'<rect width="{width}" height="{height}" fill="#ffffff"/>']
    for place, chart in enumerate(charts):
        row, column = divmod(place, columns)
        elements.append(f'<g transform="translate({column * _WIDTH} {row * _HEIGHT})">')
        elements += [*_axes(chart), *_legend(chart)]
        for line, colour in zip(chart.lines, _COLOURS * len(chart.lines), strict=False):
            elements += _draw_line(line, colour, chart)
        elements.append("</g>")
    return "\n".join([*elements, "</svg>"]) + "\n"


def _axes(chart: Chart) -> Iterator[str]:
    yield _text(_LEFT, 20, chart.title, weight="bold")
    yield _text(_LEFT - 8, _TOP - 10, chart.y_label)
    yield _text(_RIGHT, _BOTTOM + 38, chart.x_label, anchor="end")
    for tick in _ticks(chart.x_ends):
        yield _text(_x(tick, chart), _BOTTOM + 18, f"{tick:g}", anchor="middle")
    for tick in _ticks(chart.y_ends):
        y = _y(tick, chart)
        yield f'<path d="M{_LEFT} {y:.1f}H{_RIGHT}" stroke="#dddddd"/>'
        yield _text(_LEFT - 8, y + 4, f"{tick:g}", anchor="end")


def _legend(chart: Chart) -> Iterator[str]:
    left = float(_LEFT)
    for line, colour in zip(chart.lines, _COLOURS * len(chart.lines), strict=False):
        if len(chart.lines) > 1:
            yield f'<rect x="{left:.1f}" y="30" width="10" height="10" fill="{colour}"/>'
            yield _text(left + 14, 40, line.label)
            left += 32 + 7 * len(line.label)


def _draw_line(line: ChartLine, colour: str, chart: Chart) -> Iterator[str]:
    if line.intervals:
        lows = [(x, low) for x, low, _ in line.intervals]
        highs = [(x, high) for x, _, high in line.intervals]
        path = _path([*highs, *reversed(lows)], chart)
        yield f'<path d="{path}Z" fill="{colour}" fill-opacity="0.2"/>'
    dashes = ' stroke-dasharray="5 4"' if line.dashed else ""
    path = _path(line.points, chart)
    yield f'<path d="{path}" fill="none" stroke="{colour}" stroke-width="1.5"{dashes}/>'
    if len(line.points) <= _MARKED_POINTS and not line.dashed:
        for x, y in line.points:
            yield f'<circle cx="{_x(x, chart):.1f}" cy="{_y(y, chart):.1f}" r="3" fill="{colour}"/>'
    for (x, y), note in zip(line.points, line.notes, strict=False):
        yield _text(_x(x, chart), _y(y, chart) - 8, note, anchor="middle")


def _path(points: Sequence[tuple[float, float]], chart: Chart) -> str:
    places = [f"{_x(x, chart):.1f} {_y(y, chart):.1f}" for x, y in points]
    return f"M{' L'.join(places)}"


def _x(value: float, chart: Chart) -> float:
    low, high = chart.x_ends
    return _LEFT + (_RIGHT - _LEFT) * (value - low) / (high - low)


def _y(value: float, chart: Chart) -> float:
    low, high = chart.y_ends
    return _BOTTOM - (_BOTTOM - _TOP) * (value - low) / (high - low)


def _widen(values: Sequence[float]) -> Range:
    """Return (lowest, highest) of the values; if they are equal, widened by 0.5 at each end."""
    low, high = min(values), max(values)
    return (low, high) if low < high else (low - 0.5, high + 0.5)


def _ticks(interval: Range) -> list[float]:
    """Return up to nine round numbers within a range."""
    least = (interval[1] - interval[0]) / 8
    magnitude = 10.0 ** floor(log10(least))
    step = next(n * magnitude for n in (1, 2, 5, 10) if n * magnitude >= least)
    first = -floor(-interval[0] / step)
    return [round(i * step, 12) for i in range(first, floor(interval[1] / step) + 1)]


def _text(x: float, y: float, text: str, *, anchor: str = "start", weight: str = "normal") -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" '
        f'font-weight="{weight}">{escape(text)}</text>'
    )


if __name__ == "__main__":
    sys.exit(main())
