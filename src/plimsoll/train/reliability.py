"""Draw a reliability diagram: do predicted probabilities come true?

Guo et al. 2017, https://arxiv.org/abs/1706.04599, figure 1.
"""

from __future__ import annotations

from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from plimsoll.algorithm.calibration import Calibration
from plimsoll.run.files import whole_file

PICTURE = "eval-calibration.png"
"""The file of the diagram if a model is measured without training."""

_LINE, _BARS = "#0072B2", "#56B4E9"


def show_calibration(calibration: Calibration, of_what: str, output_png: Path) -> dict[str, float]:
    """Draw each bin's observed share over its mean prediction, and its count; return the error.

    Args:
        calibration: the bins and the calibration error.
        of_what: the title of the diagram.
        output_png: the file to write.

    Raises:
        PlimsollError: the file cannot be written.
    """
    predicted_K = calibration.predicted_K
    figure = Figure(figsize=(5.6, 5.6), layout="tight")
    canvas = FigureCanvasAgg(figure)
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))
    above.plot([0, 1], [0, 1], color="#999999", linestyle="--", label="calibrated")
    above.plot(predicted_K, calibration.observed_K, color=_LINE, marker="o", label="model")
    above.set(xlim=(0, 1), ylim=(0, 1), ylabel="observed share")
    title = f"{of_what}; calibration error {calibration.error:.3f}"
    above.set_title(title, loc="left", fontsize=10)
    above.legend(frameon=False, fontsize=8, loc="upper left")
    bars = below.bar(predicted_K, calibration.counts_K, width=0.06, color=_BARS)
    below.bar_label(bars, fmt="{:,.0f}", fontsize=7)
    below.set(xlabel="predicted probability", ylabel="count")
    below.margins(y=0.25)
    for axes in (above, below):
        axes.spines[["top", "right"]].set_visible(False)
    with whole_file(output_png) as partial:
        canvas.print_figure(partial, format="png", dpi=120)
    return {"calibration_error": calibration.error}
