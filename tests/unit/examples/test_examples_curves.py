"""Curves of runs that are compared: what is told of them, and what is drawn."""

from __future__ import annotations

import json
import re
import runpy
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

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
