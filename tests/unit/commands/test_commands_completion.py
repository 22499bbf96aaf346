"""Completion: what is offered, and that bash takes it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from plimsoll.cli import main

NO_BASH = not shutil.which("bash")


@pytest.mark.parametrize(
    "words, offered",
    [
        (["gr"], {"grpo"}),
        (["init", ""], {"sft", "dpo", "grpo"}),
        (["init", "sft", "--mo"], {"--model"}),
        (["sft", "x.yaml", "--dry"], {"--dry-run"}),
        (["grpo", "x.yaml", "--actor."], {"--actor.zero.", "--actor.adapter."}),
        (["grpo", "x.yaml", "--actor.zero.sta"], {"--actor.zero.stage"}),
        (["grpo", "x.yaml", "--actor.zero.stage", ""], {"0", "1", "2", "3"}),
        (["sft", "x.yaml", "--actor.model.gradient_checkpointing", "t"], {"true"}),
        (["init", "dpo", "--algorithm.lo"], {"--algorithm.loss."}),
        (["grpo", "x.yaml", "--actor.zero.stage", "=", "2"], {"2"}),
        (["grpo", "x.yaml", "--actor.zero.stage=2"], {"--actor.zero.stage=2"}),
        (["grpo", "x.yaml", "--run.resume", "a"], {"auto"}),
        (["grpo", "x.yaml", "--run.steps", "n"], {"null"}),
    ],
)
def test_what_is_offered(
    capsys: pytest.CaptureFixture[str], words: list[str], offered: set[str]
) -> None:
    assert main(["complete", *words]) == 0
    found = capsys.readouterr().out.split()
    assert offered <= set(found)
    assert all(one.startswith(words[-1]) for one in found)


def test_keys_of_a_config_are_those_of_its_job(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine.yaml").write_text("# dpo: mine.yaml\n")
    assert main(["complete", "plan", str(tmp_path / "mine.yaml"), "--reference_"]) == 0
    assert capsys.readouterr().out.split() == ["--reference_logprobs."]


def test_values_after_a_sign_that_a_shell_takes_for_a_word(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["complete", "grpo", "x.yaml", "--actor.zero.stage", "="]) == 0
    assert capsys.readouterr().out.split() == ["0", "1", "2", "3"]


def test_a_file_is_left_to_the_shell(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["complete", "sft", "mi"]) == 0
    assert capsys.readouterr().out.strip() == ""


@pytest.mark.skipif(NO_BASH, reason="no bash")
def test_bash_takes_it() -> None:
    script = (
        'eval "$(plimsoll completion bash)"; COMP_WORDS=(plimsoll sft x.yaml --run.resu); '
        'COMP_CWORD=3; _plimsoll; echo "${COMPREPLY[@]}"'
    )
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    found = subprocess.run(
        ["bash", "-c", script], env={**os.environ, "PATH": path}, capture_output=True, text=True
    )
    assert found.stdout.split() == ["--run.resume"]
