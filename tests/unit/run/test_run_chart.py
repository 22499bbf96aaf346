"""Charts are SVG: points, bands and ticks stand where their values say."""

from __future__ import annotations

from xml.etree import ElementTree

import pytest

from plimsoll.run.chart import Chart, ChartLine, draw_charts

SVG = "{http://www.w3.org/2000/svg}"


def centres(picture: str) -> list[tuple[float, float]]:
    root = ElementTree.fromstring(picture)
    return [(float(c.attrib["cx"]), float(c.attrib["cy"])) for c in root.iter(f"{SVG}circle")]


def test_points_stand_where_their_values_say() -> None:
    chart = Chart("a < b", "step", "share", [ChartLine("x", [(0, 0), (5, 1), (10, 0.5)])])
    (left, low), (middle, high), (right, half) = centres(draw_charts([chart]))
    assert middle == pytest.approx((left + right) / 2)
    assert half == pytest.approx((low + high) / 2) and high < low
    texts = [t.text for t in ElementTree.fromstring(draw_charts([chart])).iter(f"{SVG}text")]
    assert "a < b" in texts and {"0", "0.2", "1", "10"} <= set(texts)


def test_a_band_is_as_wide_as_its_intervals_and_widens_the_axis() -> None:
    line = ChartLine("x", [(1, 0.5), (2, 0.5)], [(1, 0.0, 1.0), (2, 0.4, 0.6)])
    picture = draw_charts([Chart("t", "step", "", [line])])
    band = next(
        p for p in ElementTree.fromstring(picture).iter(f"{SVG}path") if "Z" in p.attrib["d"]
    )
    heights = [float(place.split()[1]) for place in band.attrib["d"].strip("MZ").split(" L")]
    assert heights == pytest.approx([70, 150, 190, 270])


def test_a_single_point_has_axes_too() -> None:
    assert centres(draw_charts([Chart("t", "step", "", [ChartLine("x", [(3, 7)])])])) == [
        (250, 170)
    ]


def test_charts_stand_two_beside_each_other() -> None:
    chart = Chart("t", "step", "", [ChartLine("x", [(0, 0), (1, 1)], notes=["first"], dashed=True)])
    root = ElementTree.fromstring(draw_charts([chart] * 3))
    moves = [g.attrib["transform"] for g in root.iter(f"{SVG}g")]
    assert moves == ["translate(0 0)", "translate(460 0)", "translate(0 320)"]
    assert (root.attrib["width"], root.attrib["height"]) == ("920", "640")
