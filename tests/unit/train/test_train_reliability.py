"""The drawing of how well scores are calibrated."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from plimsoll.algorithm.calibration import calibrate_pairs
from plimsoll.train.reliability import show_calibration


def test_calibration_is_drawn(tmp_path: Path) -> None:
    calibration = calibrate_pairs(np.array([1, 2, -1, 0.1], dtype=np.float32))
    file = tmp_path / "calibration.png"
    assert show_calibration(calibration, "4 pairs", file) == {
        "calibration_error": calibration.error
    }
    assert file.read_bytes()[:4] == b"\x89PNG" and file.stat().st_size > 5_000
    assert [path.name for path in tmp_path.iterdir()] == ["calibration.png"]
