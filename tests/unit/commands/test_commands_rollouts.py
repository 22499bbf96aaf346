"""`plimsoll rollouts`: groups of responses for people, and what it refuses."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from plimsoll.cli import main
from plimsoll.commands.demo import make_tokenizer
from plimsoll.commands.rollouts import RolloutQuery, show_rollouts
from plimsoll.errors import ConfigError
from plimsoll.records import (
    ADVANTAGES,
    SAMPLER_LOGPROBS,
    TOKEN_REWARDS,
    WEIGHT_VERSIONS,
    Prompt,
    RewardPart,
    Trajectory,
    Turn,
    single_turn,
)
from plimsoll.run.directory import RunDirectory
from plimsoll.run.output import safe_text
from plimsoll.run.responses import excerpt
from plimsoll.run.trajectories import write_trajectories

GROUP = """\
Step 5, group 0: 2 responses, mean reward 0.75 (0.25 to 1.25)
Prompt 7 of sums
    7 + 1 =
Reference: 8

[1] reward 1.25 | right 1, form 0.5 | advantage +0.5 | 3 tokens | version 4
    8\\x1b[31m

[0] reward 0.25 | right 0, form 0.5 | advantage -0.5 | 3 tokens, cut off | version 4
    seven
"""
TURNS = """\
    [assistant, reward 0.5] So <tool_call>{"name": "add"}</tool_call> (wrong: no arguments)
    [tool] add: 12
    [assistant] 12
"""
MASK = "      7+5=\n    +  1\n      ##\n    + 12<end>\n"
BRANCHES = f"    [branch 1 of 2]\n      7+5=\n    + 8<end>\n    [branch 2 of 2]\n{MASK}"


def response(prompt: int, group: int, sample: int, right: float, text: str) -> Trajectory:
    return single_turn(
        Prompt(prompt, np.array([1], np.int32), f"{prompt} + 1 =", f"{prompt + 1}", "sums"),
        sample,
        np.array([5, 6, 7]),
        np.zeros(3, np.float32),
        text,
        "stop" if right else "length",
        4,
        (RewardPart("right", right), RewardPart("form", 0.5, 0.5)),
        group=group,
    )


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Two steps that share prompt 7, and one of other prompts."""
    steps = {
        1: [response(7, 0, 0, 0.0, "9"), response(7, 0, 1, 0.0, "10")],
        2: [response(3, 0, 0, 1.0, "4"), response(3, 0, 1, 1.0, "four")],
        5: [
            *(response(7, 0, 0, 0.0, "seven"), response(7, 0, 1, 1.0, "8\x1b[31m")),
            *(response(8, 1, 0, 1.0, "9"), response(8, 1, 1, 1.0, "nine")),
        ],
    }
    for step, rows in steps.items():
        path = RunDirectory(tmp_path).trajectories_path(step)
        scored = [
            t.add_columns({ADVANTAGES: np.full(3, t.reward - 0.75, np.float32)}) for t in rows
        ]
        write_trajectories(path, step, scored)
    return tmp_path


def test_a_step_is_a_line_for_each_group(run: Path) -> None:
    lines = show_rollouts(run, RolloutQuery(), None).splitlines()
    figures = re.findall(r"\d+", lines[0])  # step, groups, responses, mean, groups of equal rewards
    assert figures == ["5", "2", "4", "1", "1"]
    assert [line.split(None, 6) for line in lines[2:5]] == [
        ["group", "reward", "lowest", "highest", "tokens", "cut", "off  prompt"],
        ["0", "0.75", "0.25", "1.25", "3", "1/2", "7 + 1 ="],
        ["1", "1.25", "1.25", "1.25", "3", "0/2", "8 + 1 ="],
    ]
    assert lines[-1].startswith("--group G shows one in full")


def test_a_group_is_shown_in_full_the_best_response_first(run: Path) -> None:
    assert safe_text(show_rollouts(run, RolloutQuery(group=0), None)) == GROUP


@pytest.mark.parametrize(
    ("wanted", "title"),
    [
        (RolloutQuery(order="worst"), "Step 5, group 0:"),
        (RolloutQuery(order="best"), "Step 5, group 1:"),
        (RolloutQuery(prompt="8 +"), "Step 5, group 1:"),
        (RolloutQuery(step=1), "Step 1, group 0:"),  # it has one
    ],
)
def test_one_group_is_chosen(run: Path, wanted: RolloutQuery, title: str) -> None:
    assert show_rollouts(run, wanted, None).startswith(title)


def test_count_shows_several_groups(run: Path) -> None:
    shown = show_rollouts(run, RolloutQuery(order="worst", count=2), None)
    titles = [line for line in shown.splitlines() if line.startswith("Step")]
    assert [re.findall(r"\d[\d.]*", title) for title in titles] == [
        ["5", "0", "2", "0.75", "0.25", "1.25"],  # step, group, responses, mean, lowest, highest
        ["5", "1", "2", "1.25"],
    ]


@pytest.mark.parametrize("wanted", [RolloutQuery(step=5, diff=1), RolloutQuery(step=1, diff=5)])
def test_a_prompts_groups_of_two_steps_come_in_their_order(run: Path, wanted: RolloutQuery) -> None:
    lines = show_rollouts(run, wanted, None).splitlines()
    assert re.findall(r"[+\d][\d.]*", lines[0]) == ["0.25", "1", "0.75", "5", "+0.5"]
    titles = [line.partition(":")[0] for line in lines if line.startswith("Step")]
    assert titles == ["Step 1, group 0", "Step 5, group 0"]


@pytest.mark.parametrize(
    ("wanted", "told"),
    [
        (RolloutQuery(step=3), r" step 3\. .* 1 to 2, 5\."),
        (RolloutQuery(group=2), r"Step 5 .* group 2\. .* 0 to 1\."),
        (RolloutQuery(prompt="z"), "2 prompts of step 5 .*'z'"),
        (RolloutQuery(diff=2), r"Step 2 .* step 5\. .*: 1\."),
        (RolloutQuery(step=2, diff=1), r"Step 1 .* step 2\. No other"),
        (RolloutQuery(diff=4), " step 4"),
        (RolloutQuery(count=0), "--count 0"),
    ],
)
def test_a_missing_step_or_group_is_refused_with_those_that_exist(
    run: Path, wanted: RolloutQuery, told: str
) -> None:
    with pytest.raises(ConfigError, match=told):
        show_rollouts(run, wanted, None)


def test_a_directory_without_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none .*run\.directory"):
        show_rollouts(tmp_path / "none", RolloutQuery(), None)
    with pytest.raises(ConfigError, match=f"{tmp_path} holds no trajectories"):
        show_rollouts(tmp_path, RolloutQuery(), None)
    file = tmp_path / "metrics.jsonl"
    file.write_text("{}\n")
    with pytest.raises(ConfigError, match=r"metrics.jsonl .*: ArrowInvalid"):
        show_rollouts(file, RolloutQuery(), None)


def test_a_file_of_trajectories_is_shown_as_a_step(run: Path) -> None:
    path = RunDirectory(run).trajectories_path(2)
    assert show_rollouts(path, RolloutQuery(), None).startswith("Step 2, group 0: 2 responses")


def episode() -> Trajectory:
    """Of three turns: a call, what the tool says, and `12` with the end of the turn. Tokens are
    characters of `0123456789+=# `; 14 is the end."""
    call = '<tool_call>{"name": "add"}</tool_call>'
    turns = (
        Turn("assistant", 0, 2, f"So {call}", reward=0.5, problem="no arguments"),
        Turn("tool", 2, 4, "add: 12"),
        Turn("assistant", 4, 7, "12"),
    )
    mask = np.array([True, True, False, False, True, True, True])
    return Trajectory(
        Prompt(7, np.array([7, 10, 5, 11], np.int32), "7+5=", "12"),
        *(0, 0, np.array([13, 1, 12, 12, 1, 2, 14]), mask),
        {
            SAMPLER_LOGPROBS: np.zeros(7, np.float32),
            WEIGHT_VERSIONS: np.zeros(7, np.int64),
            TOKEN_REWARDS: np.zeros(7, np.float32),
        },
        *("12", "stop"),
        rewards=(RewardPart("environment", 0.5),),
        turns=turns,
    )


@pytest.fixture
def played(tmp_path: Path) -> Path:
    """A run with one episode, its config and its model's tokenizer."""
    make_tokenizer().save_pretrained(tmp_path / "model")
    (tmp_path / "model" / "config.json").write_text('{"model_type": "qwen2"}')
    config = "# grpo\nrun: {directory: played, steps: 1}\nactor: {model: {path: MODEL}}\n"
    config += "data: {train: {path: rows.jsonl, prompt: prompt, reference: answer}}\n"
    config += "rewards: {right: {name: exact_match}}\n"
    run = RunDirectory(tmp_path / "played")
    write_trajectories(run.trajectories_path(1), 1, [episode()])
    run.config_path.write_text(config.replace("MODEL", str(tmp_path / "model")))
    return tmp_path / "played"


def test_an_episode_is_shown_turn_by_turn_with_calls_and_results(played: Path) -> None:
    assert show_rollouts(played, RolloutQuery(), None).endswith(TURNS)


def test_a_mask_shows_all_tokens_and_which_are_learned_from(played: Path) -> None:
    shown = show_rollouts(played, RolloutQuery(mask=True), None)
    assert shown.endswith(f" | 7 tokens | version 0\n{MASK}")
    file = RunDirectory(played).trajectories_path(1)
    assert show_rollouts(file, RolloutQuery(mask=True), None) == shown


def test_a_mask_shows_each_branch(played: Path) -> None:
    """The first goes on from its own prompt; what it sampled is the second's beginning."""
    last = episode()
    mask = np.array([True, True])
    first = replace(
        *(last,),
        response_tokens=np.array([8, 14]),
        loss_mask=mask,
        columns={column: array[:2] for column, array in last.columns.items()},
        turns=(Turn("assistant", 0, 2, "8"),),
        rewards=(),
    )
    file = RunDirectory(played).trajectories_path(1)
    write_trajectories(file, 1, [replace(last, earlier=(first,))])
    assert show_rollouts(played, RolloutQuery(mask=True), None).endswith(BRANCHES)


def test_a_mask_needs_the_tokenizer_of_the_run(played: Path, tmp_path: Path) -> None:
    alone = tmp_path / "alone.parquet"
    alone.write_bytes(RunDirectory(played).trajectories_path(1).read_bytes())
    with pytest.raises(ConfigError, match=r"config\.yaml .*run\.directory"):
        show_rollouts(alone, RolloutQuery(mask=True), None)
    shutil.rmtree(tmp_path / "model")
    with pytest.raises(ConfigError, match="model"):
        show_rollouts(played, RolloutQuery(mask=True), None)


@pytest.mark.parametrize(
    ("length", "shown"),
    [(23, "one two three four five"), (15, "one t ...  five"), (6, "one tw")],
)
def test_a_long_text_keeps_its_beginning_and_its_end(length: int, shown: str) -> None:
    assert excerpt(" one two\n\nthree  four five ", length) == shown


def test_the_command_takes_its_options_and_refuses_two_orders(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["rollouts", str(run), "--step", "5", "--worst"]) == 0
    assert "Step 5, group 0" in capsys.readouterr().out
    assert main(["rollouts", str(run), "--worst", "--diff", "1"]) == 2
    assert "not allowed with argument" in capsys.readouterr().err


def test_showing_a_step_of_128_rows_imports_no_torch(tmp_path: Path) -> None:
    rows = [response(i // 8, i // 8, i % 8, float(i % 3 == 0), "so " * 100) for i in range(128)]
    write_trajectories(RunDirectory(tmp_path).trajectories_path(1), 1, rows)
    program = """
import sys
from plimsoll.cli import main
main(["rollouts", sys.argv[1]])
print("torch" in sys.modules)
"""
    command = [sys.executable, "-c", program, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.stdout.startswith("Step 1: 16 groups, 128 responses"), done.stderr
    assert done.stdout.endswith("False\n")
