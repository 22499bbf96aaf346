"""Curves of runs that are compared: what is told of them, and what is drawn."""

from __future__ import annotations

import json
import re
import runpy
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from xml.etree import ElementTree

import numpy as np
import pytest

SCRIPT = Path(__file__).parents[3] / "examples" / "curves.py"


@pytest.fixture(scope="module")
def curves() -> SimpleNamespace:
    return SimpleNamespace(**runpy.run_path(str(SCRIPT)))


@pytest.fixture
def runs(tmp_path: Path) -> Callable[..., str]:
    """Writes runs with these held-out figures at steps 0, 1, ..., and gives them with their
    label."""

    def write(label: str, *each: list[float]) -> str:
        directories = []
        for i, values in enumerate(each):
            run = tmp_path / f"{label}-{i}"
            run.mkdir()
            lines = [
                {"step": step, "reward": 0.5, "eval/x": x, "eval/y": 1 - x}
                for step, x in enumerate(values)
            ]
            (run / "metrics.jsonl").write_text("".join(json.dumps(one) + "\n" for one in lines))
            directories.append(str(run))
        return f"{label}={','.join(directories)}"

    return write


def test_the_difference_is_printed_with_its_interval(
    tmp_path: Path,
    curves: SimpleNamespace,
    runs: Callable[..., str],
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Differences of 0.2, 0.3 and 0.4: 0.3 +- 4.302653 * 0.1 / sqrt(3)."""
    several = runs("several", [0.25, 0.5, 0.45], [0.25, 0.5, 0.55], [0.25, 0.5, 0.65])
    picture = tmp_path / "curves.svg"
    assert curves.main([str(picture), "eval/x,eval/y", several, runs("one", [0.25, 0.75])]) == 0
    lines = capsys.readouterr().out.splitlines()
    figures = [re.findall(r"[-+]?\d\.\d{3}", line.partition(": ")[2]) for line in lines]
    assert [line.partition(":")[0] for line in lines] == [
        *("several, eval/x", "several, eval/y"),
        *("one, eval/x", "one, eval/y"),
    ]
    assert figures == [
        *(["0.250", "0.450", "0.250", "0.550", "0.250", "0.650", "+0.300", "+0.052", "+0.548"],),
        *(["0.750", "0.550", "0.750", "0.450", "0.750", "0.350", "-0.300", "-0.548", "-0.052"],),
        ["0.250", "0.750", "+0.500"],
        ["0.750", "0.250", "-0.500"],
    ]
    assert picture.read_text().startswith("<svg")


def test_the_curve_of_several_runs_is_their_mean(
    curves: SimpleNamespace, runs: Callable[..., str]
) -> None:
    label, found = curves._labelled(runs("a", [0.25, 0.5], [0.25, 0.75], [0.25, 1.0]))
    reward, held_out = curves.charts_of({label: found}, ["eval/x"])
    (line,) = held_out.lines
    half = 4.302653 * 0.25 / np.sqrt(3)
    assert line.points == [(0, 0.25), (1, 0.75)]
    assert line.intervals[1] == pytest.approx((1, 0.75 - half, 0.75 + half))
    assert (reward.lines[0].label, reward.lines[0].points) == ("a", [(0, 0.5), (1, 0.5)])


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("runs/a", "'runs/a' has no label"),
        ("a=nowhere", "nowhere is no directory"),
        (None, "A run of 'a' has no eval/z"),
    ],
)
def test_runs_that_cannot_be_drawn_are_named(
    tmp_path: Path,
    curves: SimpleNamespace,
    runs: Callable[..., str],
    capsys: pytest.CaptureFixture[str],
    given: str | None,
    message: str,
) -> None:
    words = [str(tmp_path / "curves.svg"), "eval/z", given or runs("a", [0.0])]
    assert curves.main(words) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "curves.svg").exists()


SVG = "{http://www.w3.org/2000/svg}"


def centres(picture: str) -> list[tuple[float, float]]:
    root = ElementTree.fromstring(picture)
    return [(float(c.attrib["cx"]), float(c.attrib["cy"])) for c in root.iter(f"{SVG}circle")]


def test_points_stand_where_their_values_say(curves: SimpleNamespace) -> None:
    chart = curves.Chart(
        "a < b", "step", "share", [curves.ChartLine("x", [(0, 0), (5, 1), (10, 0.5)])]
    )
    (left, low), (middle, high), (right, half) = centres(curves.draw_charts([chart]))
    assert middle == pytest.approx((left + right) / 2)
    assert half == pytest.approx((low + high) / 2) and high < low
    texts = [t.text for t in ElementTree.fromstring(curves.draw_charts([chart])).iter(f"{SVG}text")]
    assert "a < b" in texts and {"0", "0.2", "1", "10"} <= set(texts)


def test_a_band_is_as_wide_as_its_intervals_and_widens_the_axis(curves: SimpleNamespace) -> None:
    line = curves.ChartLine("x", [(1, 0.5), (2, 0.5)], [(1, 0.0, 1.0), (2, 0.4, 0.6)])
    picture = curves.draw_charts([curves.Chart("t", "step", "", [line])])
    band = next(
        p for p in ElementTree.fromstring(picture).iter(f"{SVG}path") if "Z" in p.attrib["d"]
    )
    heights = [float(place.split()[1]) for place in band.attrib["d"].strip("MZ").split(" L")]
    assert heights == pytest.approx([70, 150, 190, 270])


def test_a_single_point_has_axes_too(curves: SimpleNamespace) -> None:
    assert centres(
        curves.draw_charts([curves.Chart("t", "step", "", [curves.ChartLine("x", [(3, 7)])])])
    ) == [(250, 170)]


def test_charts_stand_two_beside_each_other(curves: SimpleNamespace) -> None:
    chart = curves.Chart(
        "t", "step", "", [curves.ChartLine("x", [(0, 0), (1, 1)], notes=["first"], dashed=True)]
    )
    root = ElementTree.fromstring(curves.draw_charts([chart] * 3))
    moves = [g.attrib["transform"] for g in root.iter(f"{SVG}g")]
    assert moves == ["translate(0 0)", "translate(460 0)", "translate(0 320)"]
    assert (root.attrib["width"], root.attrib["height"]) == ("920", "640")
