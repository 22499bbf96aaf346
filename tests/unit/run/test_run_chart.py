"""The chart is SVG: points, notes and ticks stand where their values say."""

from __future__ import annotations

from xml.etree import ElementTree

import pytest

from plimsoll.run.chart import draw_calibration

SVG = "{http://www.w3.org/2000/svg}"


def test_points_stand_where_their_values_say() -> None:
    picture = draw_calibration("a < b", [(0, 0), (0.5, 1), (1, 0.5)], ["5", "1,000", "7"])
    root = ElementTree.fromstring(picture)
    circles = [(float(c.attrib["cx"]), float(c.attrib["cy"])) for c in root.iter(f"{SVG}circle")]
    (left, low), (middle, high), (right, half) = circles
    assert middle == pytest.approx((left + right) / 2)
    assert half == pytest.approx((low + high) / 2) and high < low
    texts = {t.text: t.attrib for t in root.iter(f"{SVG}text")}
    assert {"a < b", "model", "calibrated", "5", "0.2", "1"} <= texts.keys()
    note = texts["1,000"]
    assert float(note["x"]) == middle and float(note["y"]) == high - 8
    model, diagonal = (p for p in root.iter(f"{SVG}path") if p.attrib.get("fill") == "none")
    assert model.attrib["d"].startswith("M60.0 270.0 L250.0 70.0")
    assert diagonal.attrib["d"] == "M60.0 270.0 L440.0 70.0"
    assert "stroke-dasharray" in diagonal.attrib
