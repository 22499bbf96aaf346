"""`run.best.metric` is one that the job's evaluation reports, or is refused with the nearest."""

from __future__ import annotations

from pathlib import Path

import pytest

from plimsoll.errors import ConfigError
from plimsoll.jobs import JOBS
from plimsoll.resolve.load import load_spec

PROMPTED = "{path: x.jsonl, prompt: q"
COLUMNS = {
    "sft": ", response: a}",
    "distill": ", response: a}",
    "rm": ", chosen: a, rejected: b}",
    "prm": ", steps: s, labels: l}",
    "dpo": ", chosen: a, rejected: b}",
    "kto": ", response: a, label: l}",
    "ppo": ", reference: a}",
}
MORE = {
    "distill": "teacher: {model: {path: t}}\n",
    "ppo": "critic: {model: {path: m}}\n"
    "rewards: {right: {name: math_answer}}\n"
    "reward_model: {role: {model: {path: r}}}\n",
}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "c.yaml"


def choose(path: Path, job: str, metric: str, *flags: str) -> None:
    source = PROMPTED + COLUMNS[job]
    path.write_text(
        f"run: {{directory: out, steps: 3, eval_every: 1, best: {{metric: {metric}}}}}\n"
        f"data: {{train: {source}, eval: {source}}}\n"
        f"actor: {{model: {{path: m}}}}\n{MORE.get(job, '')}"
    )
    load_spec(JOBS[job], str(path), flags)


@pytest.mark.parametrize(
    ("job", "wrong", "near", "goal"),
    [
        ("sft", "loss", "eval/loss", "lowest"),
        ("sft", "eval/perplexty", "eval/perplexity", "lowest"),
        ("distill", "eval/divergance", "eval/divergence", "lowest"),
        ("rm", "eval/calibration", "eval/calibration_error", "lowest"),
        ("prm", "eval/solution-accuracy", "eval/solution_accuracy", "highest"),
        ("dpo", "eval/rewards/margins", "eval/rewards/margin", "highest"),
        ("kto", "accuracy", "eval/accuracy", "highest"),
        ("ppo", "eval/reward/right", "eval/right", "highest"),
        ("ppo", "eval/reward_modle", "eval/reward_model", "lowest"),
    ],
)
def test_the_nearest_names_are_offered(
    path: Path, job: str, wrong: str, near: str, goal: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        choose(path, job, wrong)
    assert f"run.best.metric: {wrong}   ({path}:1)" in str(caught.value)
    assert "[best-metric]" in str(caught.value) and near in str(caught.value).splitlines()[-1]
    choose(path, job, near, "--run.best.goal", goal)


def test_all_names_are_listed_if_none_is_near(path: Path) -> None:
    with pytest.raises(ConfigError, match=r"-> one of eval/loss, eval/perplexity$"):
        choose(path, "sft", "quality")


def test_a_loss_of_ones_own_may_report_what_it_likes(path: Path) -> None:
    choose(path, "dpo", "eval/mine", "--algorithm.loss.name", "my.module:my_loss")
