"""The drawing of how well scores are calibrated."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

import numpy as np

from plimsoll.algorithm.figures import calibrate_pairs
from plimsoll.train.measure import show_calibration


def test_calibration_is_drawn(tmp_path: Path) -> None:
    found = calibrate_pairs(np.array([1, 2, -1, 0.1], dtype=np.float32))
    file = tmp_path / "calibration.svg"
    assert show_calibration(found, "4 pairs", file) == {"calibration_error": found.error}
    root = ElementTree.fromstring(file.read_text())
    circles = list(root.iter("{http://www.w3.org/2000/svg}circle"))
    texts = [t.text for t in root.iter("{http://www.w3.org/2000/svg}text")]
    assert len(circles) == len(found.counts_K)
    assert f"4 pairs; calibration error {found.error:.3f}" in texts
    assert [path.name for path in tmp_path.iterdir()] == ["calibration.svg"]
