from __future__ import annotations

import io
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from dataclasses import replace
from fcntl import ioctl
from pathlib import Path
from typing import get_args

import pytest

from plimsoll.run.displays import Figure, StepReport, figures, headline
from plimsoll.run.ledger import MemoryUse
from plimsoll.run.numbers import bytes_text, duration_text, gigabytes_text
from plimsoll.run.phases import TimedPhase
from plimsoll.run.progress import Progress

CONTROL = re.compile(r"[\x00-\x09\x0b-\x1f\x7f\x80-\x9f]")


MEMORY = {
    "controller": MemoryUse(700_000_000, 400_000_000),
    "rank 1": MemoryUse(1_950_000_000, 2_000_000_000),
    "engine 0": MemoryUse(512_000_000, None),
    "node 0": MemoryUse(5_062_000_000, None),
}


def report(step: int, **metrics: float) -> StepReport:
    return StepReport(
        step=step,
        metrics={"reward": 0.5, "kl": 0.0123456, "policy_loss": -1e-5, "entropy": 2.0} | metrics,
        tokens=6400,
        seconds={"rollout": 2.0, "train_actor": 1.2},
        memory=MEMORY,
    )


def test_tokens_per_second_are_of_what_works_on_them() -> None:
    assert report(1).tokens_per_second == pytest.approx(2000.0)
    beside = {"data": 9.0, "precompute": 8.0, "load": 7.0, "eval": 6.0, "save": 5.0}
    of_step = {"rollout": 1.0, "score": 0.5, "train_critic": 0.25, "train_actor": 0.2, "sync": 0.05}
    assert {*beside, *of_step} == {*get_args(TimedPhase)}
    found = StepReport(1, {}, 6400, beside | of_step, {})
    assert found.tokens_per_second == pytest.approx(3200.0)
    assert StepReport(1, {}, 5, {"eval": 1.0}, {}).tokens_per_second == 0.0
    assert StepReport(1, {}, 5, {}, {}).tokens_per_second == 0.0


def test_mfu_is_the_share_of_what_the_cards_would_do_at_their_peak() -> None:
    assert replace(report(1), tokens_at_peak=8000.0).mfu == pytest.approx(0.25)
    assert report(1).mfu is None


def test_the_headline_is_rewards_kl_losses_and_accuracy() -> None:
    shown = ["reward", "reward/form", "kl", "value_loss", "loss", "eval/accuracy"]
    bounds = ["eval/accuracy_low", "eval/accuracy_high"]
    names = ["entropy", *bounds, *shown, "policy_loss", "approx_kl", "kl_coefficient", "rewarding"]
    assert list(headline(dict.fromkeys(names, 1.0) | {"reward": 2.0})) == shown


EVALUATED = {"eval/reward": -0.25, "eval/reward_low": -0.5, "eval/reward_high": 1 / 64}


def test_a_figure_is_shown_with_its_interval(tmp_path: Path) -> None:
    stream = io.StringIO()
    with Progress("ppo", 200, tmp_path, stream) as progress:
        progress.update(StepReport(1, EVALUATED, 1, {}, {}))
        narrower = EVALUATED | {"eval/reward_low": -0.3125, "eval/reward_high": -0.21875}
        progress.update(StepReport(2, narrower, 1, {}, {}))
    first, second = stream.getvalue().splitlines()[1:]
    cells = [line.split("|")[1] for line in (first, second)]
    assert [cell.split() for cell in cells] == [
        ["eval/reward", "-0.25", "(-0.5", "to", "0.01562)"],
        ["eval/reward", "-0.25", "(-0.3125", "to", "-0.2188)"],
    ]
    assert len(cells[0]) == len(cells[1])


def test_the_only_part_of_a_reward_is_not_shown_twice() -> None:
    alone = {"reward": 0.5, "reward/correct": 0.5, "kl": 0.1}
    assert [*headline(alone)] == ["reward", "kl"]
    assert [*headline(alone | {"reward/correct": 0.25})] == ["reward", "reward/correct", "kl"]
    assert len(headline(alone | {"reward/short": 0.5})) == 4


def test_phases_before_the_first_step_are_lines_once(tmp_path: Path) -> None:
    out = io.StringIO()
    with Progress("ppo", 2, tmp_path, out) as progress:
        for phase in ("load", "rollout", "load"):
            progress.enter(phase)
        progress.update(report(1))
        progress.enter("score")
    lines = out.getvalue().splitlines()
    assert lines[1:3] == ["ppo: load begins", "ppo: rollout begins"]
    assert len(lines) == 4 and lines[3].startswith("ppo step 1/2")


def test_a_number_named_low_alone_is_a_figure_of_its_own() -> None:
    assert figures({"eval/low": 1.0, "eval/x_low": 2.0, "eval/x": 3.0}) == {
        "eval/low": Figure(1.0),
        "eval/x_low": Figure(2.0),
        "eval/x": Figure(3.0),
    }


def test_plain_lines_are_aligned_ascii_with_units(tmp_path: Path) -> None:
    stream = io.StringIO()
    with Progress("ppo", 200, tmp_path, stream) as progress:
        progress.update(report(9))
        progress.note("saved")
        progress.update(report(10, reward=-0.25))
    first, line9, note, line10 = stream.getvalue().splitlines()
    assert first == f"ppo: 200 steps, written to {tmp_path}"
    assert note == "saved"
    assert [" ".join(cell.split()) for cell in line9.split("|")] == [
        "ppo step 9/200",
        "reward 0.5",
        "kl 0.01235",
        "2,000 tokens/s",
        "3.2 s (rollout 2.0, train_actor 1.2)",
        "memory rank 1 1.95 GB (plan 2), engine 0 512 MB, node 0 5.06 GB",
        "left 0:10:11",  # 191 steps of 3.2 s
    ]
    assert [i for i, c in enumerate(line9) if c == "|"] == [
        i for i, c in enumerate(line10) if c == "|"
    ]
    assert "reward     -0.25" in line10
    assert not CONTROL.search(stream.getvalue()) and stream.getvalue().isascii()


def test_one_process_is_its_node(tmp_path: Path) -> None:
    stream = io.StringIO()
    use = MemoryUse(42_000_000, None)
    with Progress("sft", 3, tmp_path, stream) as progress:
        progress.update(StepReport(1, {}, 1, {}, {"local": use, "node 0": use}))
    assert "| memory local 42 MB |" in stream.getvalue()


def test_what_comes_before_the_steps_does_not_count_for_the_time_left(tmp_path: Path) -> None:
    stream = io.StringIO()
    with Progress("sft", 3, tmp_path, stream) as progress:
        progress.update(StepReport(1, {}, 1, {"data": 50.0, "load": 100.0, "train_actor": 2.0}, {}))
    assert stream.getvalue().rstrip().endswith("left 0:00:04")


def test_an_evaluation_before_training_says_nothing_of_the_time_left(tmp_path: Path) -> None:
    stream = io.StringIO()
    with Progress("ppo", 3, tmp_path, stream) as progress:
        progress.update(StepReport(0, {}, 0, {"load": 100.0, "eval": 50.0}, {}))
        progress.update(StepReport(1, {}, 1, {"rollout": 1.0, "train_actor": 1.0}, {}))
    before, first = stream.getvalue().splitlines()[1:]
    assert before.startswith("ppo step 0/3 | ") and "left" not in before
    assert first.endswith("left 0:00:04")


@pytest.mark.parametrize("variables", [{}, {"FORCE_COLOR": "1", "TTY_COMPATIBLE": "1"}])
def test_a_pipe_gets_no_control_codes(tmp_path: Path, variables: dict[str, str]) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, env=os.environ | variables, check=True
    )
    text = done.stdout.decode("ascii")
    assert not CONTROL.search(text)
    assert text.count("\n") == 7 and "ppo step 3/3" in text
    assert "sequences scored 3/4\nsequences scored 4/4\n" in text


def test_an_ascii_stream_takes_any_note(tmp_path: Path) -> None:
    raw = io.BytesIO()
    with Progress("ppo", 1, tmp_path, io.TextIOWrapper(raw, encoding="ascii")) as progress:
        progress.note("größer")
        assert raw.getvalue().endswith(b"gr\\xf6\\xdfer\n")


PROGRAM = """
import time
from pathlib import Path
from plimsoll.run.ledger import MemoryUse
from plimsoll.run.progress import Progress
from plimsoll.run.displays import StepReport
with Progress("ppo", 3, Path("runs/a")) as progress:
    with progress.counting("sequences scored", 4) as advance:
        advance(3)
        advance(1)
    for step in (1, 2, 3):
        metrics = {"reward": 0.25 * step, "reward/math_answer": 0.5, "kl": 0.01, "loss": 1.5}
        if step == 1:
            metrics |= {"eval/reward": 0.5, "eval/reward_low": 0.25, "eval/reward_high": 0.75}
        seconds = {"rollout": 1.0, "score": 0.25, "train_actor": 0.75}
        memory = {"rank 0": MemoryUse(19 * 10**8, 21 * 10**8), "engine 0": MemoryUse(42_000, None)}
        progress.update(StepReport(step, metrics, 4000, seconds, memory))
        if step == 2:
            progress.note("a note that stays")
            progress.enter("rollout")
            scored = [*map(progress.count_calls(str), range(37))]
            time.sleep(0.4)  # redrawn four times a second
"""


SAMPLED = """
import sys
from pathlib import Path
import numpy as np
from plimsoll.records import Prompt, RewardPart, single_turn
from plimsoll.run.directory import RunDirectory
from plimsoll.run.progress import MetricsSink
from plimsoll.run.progress import Progress
from plimsoll.run.displays import StepReport
from plimsoll.run.trajectories import write_trajectories

def answer(group, sample, reward, text):
    prompt = Prompt(group, np.array([1], np.int32), f"question {group}")
    rewards = (RewardPart("right", reward),)
    tokens, zeros = np.array([1]), np.zeros(1, np.float32)
    return single_turn(prompt, sample, tokens, zeros, text, "stop", 0, rewards, group=group)

run = RunDirectory(Path(sys.argv[1]))
with Progress("ppo", 2, run.path) as progress:
    sink = MetricsSink(run, progress)
    dull = [answer(0, 0, 0.5, "dull"), answer(0, 1, 0.5, "dull too")]
    long = "\\x1b[2J" + "thinking " * 90 + "#### 4"
    apart = [answer(1, 0, 0.0, long), answer(1, 1, 1.0, "#### 5")]
    write_trajectories(run.trajectories_path(1), 1, dull + apart)
    sink.write(StepReport(1, {"reward": 0.5}, 4, {}, {}))
    write_trajectories(run.trajectories_path(2), 2, dull)
    sink.write(StepReport(2, {"reward": 0.5}, 4, {}, {}))
"""


def on_terminal(columns: int, terminal: str = "xterm-256color", *words: str) -> str:
    """What PROGRAM writes to a real pseudo-terminal of this width. words: of another program."""
    controller, terminal_end = pty.openpty()
    ioctl(terminal_end, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    unset = ("COLUMNS", "LINES", "NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE")
    env = {k: v for k, v in os.environ.items() if k not in unset} | {"TERM": terminal}
    program = [sys.executable, "-c", *(words or [PROGRAM])]
    process = subprocess.Popen(program, stdout=terminal_end, env=env)
    os.close(terminal_end)
    chunks = []
    while True:
        try:
            chunk = os.read(controller, 65536)
        except OSError:  # Linux's way to say that the other end is closed
            break
        if not chunk:
            break
        chunks.append(chunk)
    os.close(controller)
    assert process.wait(timeout=20) == 0
    return b"".join(chunks).decode()


@pytest.mark.parametrize("columns", [80, 30])
def test_a_terminal_gets_a_block_within_its_width(columns: int) -> None:
    written = on_terminal(columns)
    assert "\x1b[" in written
    assert written.count("\x1b[?25l") == written.count("\x1b[?25h")  # the cursor is shown again
    shown = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", written)
    lines = re.split(r"[\r\n]+", shown)
    assert max(map(len, lines)) <= columns
    assert "ppo 3/3" in shown and "a note that stays" in shown and "scored" in shown


def test_the_block_shows_what_goes_on_until_the_run_ends() -> None:
    shown = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", on_terminal(100))
    now = "now      rollout, 37 done, 0:00:0"
    assert now in shown[shown.rindex("ppo 2/3") - 200 : shown.rindex("ppo 3/3")]
    assert shown.index("memory", shown.rindex("ppo 3/3")) > shown.rindex("now ")


def test_the_block_shows_values_speed_seconds_and_memory() -> None:
    shown = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", on_terminal(100))
    last = " ".join(shown[shown.rindex("ppo 3/3") :].split())
    assert "0/4" in shown and "scored" not in last
    for part in (
        "0:00:00 left",
        "metrics reward 0.75 reward/math_answer 0.5 kl 0.01 loss 1.5",
        "loss 1.5 eval/reward 0.5 (0.25 to 0.75)",
        "speed 2,000 tokens/s 2.0 s/step",
        "seconds rollout 1.0 score 0.2 train_actor 0.8",
        "memory rank 0 1.9 GB (plan 2.1) engine 0 42 kB",
    ):
        assert part in last


def test_the_block_shows_the_best_and_the_worst_of_a_group(tmp_path: Path) -> None:
    written = on_terminal(80, "xterm-256color", SAMPLED, str(tmp_path))
    assert "\x1b[2J" not in written  # a response's own, which would empty the screen
    shown = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", written)
    lines = re.split(r"[\r\n]+", shown)
    assert max(map(len, lines)) <= 80
    first, second = shown[shown.index("ppo 1/2") :].split("ppo 2/2", 1)
    place = next(i for i, line in enumerate(lines) if line.startswith("prompt"))
    assert [line.split() for line in lines[place : place + 2]] == [
        ["prompt", "question", "1"],
        ["best", "1", "####", "5"],
    ]
    worst = first[first.index("worst 0") :]
    begun, ended = worst.splitlines()[:2]
    assert begun.startswith("worst 0 \\x1b[2Jthinking thinking")
    assert ended.startswith("       ") and ended.rstrip().endswith("thinking #### 4")
    assert "sampled 0.5 dull" in " ".join(second.split()) and "worst" not in second


def test_a_pipe_gets_no_responses(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SAMPLED, str(tmp_path)], capture_output=True, text=True, check=True
    )
    assert done.stdout.count("\n") == 3 and "question" not in done.stdout


def test_a_dumb_terminal_gets_plain_lines() -> None:
    written = on_terminal(80, terminal="dumb")
    assert "\x1b" not in written and "ppo step 3/3" in written


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (1536 * 1024**2, "1.5 GiB"),
        (2 * 1024**4, "2.0 TiB"),
        (5000 * 1024**4, "5000.0 TiB"),
    ],
)
def test_bytes(count: int, text: str) -> None:
    assert bytes_text(count) == text


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (42_000, "42 kB"),
        (42_100_000, "42.1 MB"),
        (999_600_000, "1 GB"),
        (1_934_000_000, "1.93 GB"),
        (84_900_000_000, "84.9 GB"),
        (2_000_000_000_000, "2000 GB"),
    ],
)
def test_decimal_bytes(count: int, text: str) -> None:
    assert gigabytes_text(count) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0:00:00"), (59.6, "0:01:00"), (3661, "1:01:01"), (360000, "100:00:00")],
)
def test_durations(seconds: float, text: str) -> None:
    assert duration_text(seconds) == text


def test_a_log_gets_the_lines_that_are_shown(tmp_path: Path) -> None:
    stream, lines = io.StringIO(), list[str]()
    with Progress("ppo", 3, tmp_path, stream, lines.append) as progress:
        progress.note("a note")
        progress.update(report(1))
        with progress.counting("scored", 10) as advance:
            advance(9)
            advance(1)
    assert lines == stream.getvalue().splitlines()
    assert len(lines) == 5 and lines[1] == "a note" and lines[-1] == "scored 10/10"
