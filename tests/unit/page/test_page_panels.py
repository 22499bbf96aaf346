"""What is drawn of a run: the panels of each job."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from plimsoll.jobs import JOBS
from plimsoll.page.curves import curve_panels, curves, time_panels, unweighted_parts
from plimsoll.page.watched import watch_runs
from plimsoll.resolve.job import Panel


def test_every_job_has_curves_and_each_axis_one_unit() -> None:
    for panels in (job.panels for job in JOBS.values()):
        assert len({panel.title for panel in panels}) == len(panels)
        assert all(panel.unit for panel in panels)


@pytest.mark.parametrize("job", sorted(name for name, job in JOBS.items() if not job.presets))
def test_what_is_drawn_of_held_out_data_is_what_the_job_evaluates(job: str) -> None:
    """In reinforcement learning it is the reward, and parts that are named in the config."""
    drawn = {name for panel in JOBS[job].panels for name in panel.series}
    evaluated = set(JOBS[job].evaluation(JOBS[job].config.model_construct()).written_names)
    assert {name for name in drawn if name.startswith("eval/")} <= evaluated
    assert "eval/loss" in drawn


@pytest.mark.parametrize(
    ("job", "unit"),
    [
        *[("sft", "nats per token"), ("distill", "nats per token"), ("rm", "per pair")],
        *[("prm", "nats per labelled step"), ("dpo", "per pair"), ("kto", "per response")],
    ],
)
def test_a_loss_is_per_what_the_job_learns_from(job: str, unit: str) -> None:
    assert curve_panels(JOBS[job].panels, [])[0] == Panel(
        "Loss", unit, {"loss": "training", "eval/loss": "held out"}
    )


def test_each_part_of_a_reward_has_axes_of_its_own_but_for_a_single_one() -> None:
    """It is the reward itself, but for its weight."""
    one = [{"step": 1, "reward": 1.0, "reward/right": 1.0}]
    assert curve_panels(JOBS["ppo"].panels, one) == tuple(JOBS["ppo"].panels)
    two = [*one, {"step": 2, "reward": 1.0, "reward/right": 1.0, "reward/length": 0.5}]
    drawn = curve_panels(JOBS["ppo"].panels, two)
    assert [(part.title, dict(part.series)) for part in drawn[1:3]] == [
        ("Reward: right", {"reward/right": "training", "eval/right": "held out"}),
        ("Reward: length", {"reward/length": "training", "eval/length": "held out"}),
    ]
    assert drawn[:1] + drawn[3:] == tuple(JOBS["ppo"].panels)


def test_a_reward_of_weight_0_is_drawn_last_as_a_metric(tmp_path: Path) -> None:
    row = {"step": 1, "reward": 1.0, "reward/length": 0.5, "reward/right": 1.0}
    (tmp_path / "config.yaml").write_text(
        "# ppo\nrewards:\n  right: {name: exact_match}\n  length: {name: length, weight: 0}\n"
    )
    (tmp_path / "metrics.jsonl").write_text(json.dumps(row) + "\n")
    run = watch_runs([tmp_path])[0].look()
    assert unweighted_parts(run) == ["length"]
    titles = [panel["title"] for panel in curves([run], "learning", (0, 9))]
    assert titles == ["Reward", "Reward: right", "Metric: length (a reward of weight 0)"]


def test_loading_is_no_part_of_a_steps_time() -> None:
    found = [
        {"step": 1, "seconds/data": 1, "seconds/load": 9, "seconds/sync": 2, "seconds/save": 1}
    ]
    assert list(time_panels(found)[0].series.values()) == ["sync", "save"]
