"""On-policy distillation: a teacher scores what the student samples."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from commands import GRPO, column, metrics, run_here, write_config, write_task
from safetensors.torch import load_file, save_file

from plimsoll.commands.demo import make_tokenizer
from plimsoll.model.tiny import tiny_config, write_tiny_model
from plimsoll.records import ADVANTAGES, COLUMNS, TEACHER_LOGPROBS
from plimsoll.run.directory import RunDirectory
from plimsoll.run.trajectories import read_trajectories

STEPS = 24
CONFIG: dict[str, Any] = {
    **deepcopy(GRPO),
    "run": {"directory": "run", "steps": STEPS},
    "batch": {"prompts": 8, "responses": 4, "micro_batch_tokens": 60},
    "teacher": {"model": {"path": "teacher", "dtype": "float32"}},
}
CONFIG["rollout"]["sampling"] = {"max_new_tokens": 8}
CONFIG["actor"]["optimizer"]["learning_rate"] = 0.003


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a teacher that is wider than the actor, has padding in its head, and is
    sure."""
    home = tmp_path_factory.mktemp("on-policy")
    write_task(home)
    wide = tiny_config("qwen2", False, vocab=40, hidden=96, heads=2, feed_forward=96)
    write_tiny_model(home / "teacher", wide, 1, make_tokenizer())
    weights = load_file(home / "teacher" / "model.safetensors")
    weights["lm_head.weight"] *= 10
    save_file(weights, home / "teacher" / "model.safetensors", metadata={"format": "pt"})
    return home


def trained(home: Path, name: str, command: str = "opd", **sections: Any) -> list[dict[str, Any]]:
    """Return the metrics of a run of the config with these sections."""
    config = {**deepcopy(CONFIG), **sections}
    config["run"] = CONFIG["run"] | {"directory": name} | sections.get("run", {})
    write_config(home, name, config)
    done = run_here(home, command, f"{name}.yaml")
    assert done.code == 0, done.err
    return metrics(home / name)


@pytest.mark.parametrize("divergence", [None, {"name": "reverse_kl"}])
def test_an_actor_comes_nearer_to_its_teacher_without_any_reward(
    home: Path, divergence: dict[str, str] | None
) -> None:
    """By the command of distillation, as the config has prompts."""
    name = "sampled" if divergence is None else "whole"
    rows = trained(home, name, "distill", algorithm={"distill_divergence": divergence})
    far = column(rows, "teacher_divergence")
    assert np.mean(far[-3:]) < 0.75 * np.mean(far[:3])
    assert not any(key.startswith("reward") or key == "zero_signal" for key in rows[-1])


def test_what_is_learned_is_the_difference_of_stored_log_probs(home: Path) -> None:
    """Beside a reward in groups: both advantages are added; a bundle finds the same again."""
    rewards = {"answer": {"name": "exact_match"}, "length": {"name": "length", "weight": -0.1}}
    rows = trained(home, "mixed", "grpo", rewards=rewards, algorithm={"distill_weight": 0.25})
    assert {"reward", "teacher_divergence"} <= rows[0].keys()
    path = RunDirectory(home / "mixed").trajectories_path(1)
    sampled = read_trajectories(path, COLUMNS.values())
    for own in sampled:
        group = [t.reward for t in sampled if t.group == own.group]
        spread = np.std(group, ddof=1)
        of_reward = (own.reward - np.mean(group)) / (spread + 1e-6)
        gap = own.columns[TEACHER_LOGPROBS] - own.sampler_logprobs
        np.testing.assert_allclose(own.columns[ADVANTAGES], of_reward + 0.25 * gap, atol=1e-4)
    assert run_here(home, "rollouts", "mixed", "--bundle", "mixed.zip").code == 0
    checked = run_here(home, "check-bundle", "mixed.zip")
    assert checked.code == 0, checked.err


def test_a_teacher_that_is_the_actor_teaches_nothing(home: Path) -> None:
    teacher = {"model": {"path": "model", "dtype": "float32"}}
    [sampled] = trained(home, "same", teacher=teacher, run={"steps": 1})
    assert sampled["teacher_divergence"] == pytest.approx(0.0, abs=1e-6)
    whole = {"distill_divergence": {"name": "jsd"}}
    [row] = trained(home, "same-whole", teacher=teacher, run={"steps": 1}, algorithm=whole)
    assert row["teacher_divergence"] == pytest.approx(0.0, abs=1e-6)
    assert row["actor/grad_norm"] == pytest.approx(0.0, abs=1e-6)


def test_an_adapter_learns_over_a_replay(home: Path) -> None:
    """The teacher scores what an earlier run sampled: no engine is started."""
    actor = {**CONFIG["actor"], "adapter": {"rank": 4}}
    trained(home, "recorded", actor=actor, run={"steps": 2})
    again = run_here(
        home, "opd", "recorded.yaml", "--replay", "recorded", "--run.directory", "again"
    )
    assert again.code == 0, again.err
    assert column(metrics(home / "again"), "teacher_divergence") == pytest.approx(
        column(metrics(home / "recorded"), "teacher_divergence"), rel=1e-5
    )


def test_another_template_is_refused(home: Path) -> None:
    config = deepcopy(CONFIG)
    small = tiny_config("qwen2", False, vocab=32, hidden=32, heads=2, feed_forward=32)
    for role, mark in (("actor", "="), ("teacher", "+")):
        tokenizer = make_tokenizer()
        tokenizer.chat_template = f"{{{{ messages[0].content }}}}{mark}"
        write_tiny_model(home / f"{role}-of-turns", small, 1, tokenizer)
        config[role]["model"]["path"] = f"{role}-of-turns"
    config["run"] = {"directory": "refused", "steps": 1}
    config["data"].pop("chat_template")
    write_config(home, "refused", config)
    refused = run_here(home, "opd", "refused.yaml")
    assert refused.code == 2 and "chat template of teacher.model.path" in refused.err
