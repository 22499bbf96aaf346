"""Draw a reliability diagram: do predicted probabilities come true?

Guo et al. 2017, https://arxiv.org/abs/1706.04599, figure 1.
"""

from __future__ import annotations

from pathlib import Path

from plimsoll.algorithm.calibration import Calibration
from plimsoll.run.chart import Chart, ChartLine, draw_charts
from plimsoll.run.files import write_whole

PICTURE = "eval-calibration.svg"
"""The file of the diagram if a model is measured without training."""


def show_calibration(calibration: Calibration, of_what: str, output_svg: Path) -> dict[str, float]:
    """Draw each bin's observed share over its mean prediction, and its count; return the error.

    `of_what` is the title of the diagram. Raises PlimsollError if the file cannot be written.
    """
    predicted, observed = calibration.predicted_K.tolist(), calibration.observed_K.tolist()
    counts = [f"{count:,}" for count in calibration.counts_K.tolist()]
    points = [*zip(predicted, observed, strict=True)]
    title = f"{of_what}; calibration error {calibration.error:.3f}"
    lines = (
        ChartLine("model", points, notes=counts),
        ChartLine("calibrated", [(0, 0), (1, 1)], dashed=True),
    )
    chart = Chart(title, "predicted probability", "observed share", lines, (0, 1), (0, 1))
    write_whole(output_svg, draw_charts([chart]))
    return {"calibration_error": calibration.error}
