"""What docs/extend.md shows runs as it stands: its files beside a config, and its commands."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from commands import PPO, metrics, run_here, write_config, write_task

PAGE = (Path(__file__).parents[2] / "docs" / "extend.md").read_text()
COMMANDS = re.findall(r"^plimsoll (grpo .*)$", PAGE, re.MULTILINE)
MINE = {key: value for key, value in PPO.items() if key not in ("critic", "algorithm")} | {
    "run": {"directory": "run", "steps": 2},
    "batch": {"prompts": 3, "responses": 4, "micro_batch_tokens": 60},
}


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("documented")
    write_task(home)
    write_config(home, "mine", MINE)
    files: dict[str, str] = {}
    for name, code in re.findall(r"```python\n# (\w+\.py)\n(.*?)```", PAGE, re.DOTALL):
        files[name] = files.get(name, "") + code
    assert {"my_rewards.py", "my_losses.py"} <= files.keys()
    for name, code in files.items():
        (home / name).write_text("from __future__ import annotations\n" + code)
    (home / "trls.py").write_text(TRLS)
    return home


def test_the_page_shows_one_of_each() -> None:
    shown = {key for command in COMMANDS for key in re.findall(r"--([\w.]+)\.name", command)}
    assert shown == {
        "rewards.short",
        "algorithm.policy_loss",
        "algorithm.advantage",
        "algorithm.correction",
    }


PICKS = (
    "grpo mine.yaml --rewards.a.name my_rewards.py:picks "
    "--rewards.a.options.letters '\"012345678\"'"
)
"""What a reference may be, of sums of one digit."""
TRLS = """
def short(completions, reference, **columns):
    assert len(columns["prompts"]) == len(reference)
    return [float(len(completion) < 9) for completion in completions]
"""
AS_IN_TRL = "grpo mine.yaml --rewards.short.name trls.py:short"


@pytest.mark.parametrize("command", [*COMMANDS, PICKS, AS_IN_TRL])
def test_a_documented_command_trains(home: Path, command: str) -> None:
    number = str(len(list(home.glob("run-*"))))
    found = run_here(home, *shlex.split(command), "--run.directory", f"run-{number}")
    assert found.code == 0, found.err
    rows = metrics(home / f"run-{number}")
    assert [row["step"] for row in rows if row["step"]] == [1, 2]
    if "short" in command:
        assert all(0 <= row["reward/short"] <= 1 for row in rows if row["step"])
