"""`plimsoll setup-verifiers` and `plimsoll verifiers-tasks`: what they refuse, and what they say
where a step fails. What they make is in tests/integration/."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from plimsoll.cli import main
from plimsoll.interop.verifiers.venv import PLACE

FAILS = "import sys; sys.exit('no network' if sys.argv[1:3] == ['-m', 'venv'] else 0)"


@pytest.fixture(autouse=True)
def elsewhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(PLACE, str(tmp_path / "venv"))


def refusal(capfd: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
    code = main([*words])
    return code, capfd.readouterr().err


def test_another_directory_is_left_as_it_is(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "thesis.txt").write_text("all of it")
    code, message = refusal(capfd, "setup-verifiers", "--directory", str(tmp_path))
    assert code == 2 and str(tmp_path) in message and "is not empty" in message
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]


def test_a_step_that_fails_is_reported_with_the_way_out(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    code, message = refusal(capfd, "setup-verifiers", "--python", str(tmp_path / "python9"))
    assert code == 2 and "python9 cannot be run: No such file" in message
    python = tmp_path / "python"
    python.write_text(f"#!{sys.executable}\n{FAILS}")
    python.chmod(0o755)
    code, message = refusal(capfd, "setup-verifiers", "--python", str(python))
    assert code == 1 and "no network" in message
    assert "-m venv" in message and "apt install python3-venv" in message


def test_tasks_need_it_and_a_new_file(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "tasks.jsonl"
    code, message = refusal(capfd, "verifiers-tasks", "sums", "--out", str(out))
    assert code == 2 and "`plimsoll setup-verifiers` makes it" in message and not out.exists()
    out.write_text("mine")
    code, message = refusal(capfd, "verifiers-tasks", "sums", "--out", str(out))
    assert code == 2 and "is there already" in message and out.read_text() == "mine"
    code, message = refusal(capfd, "verifiers-tasks", "sums")
    assert code == 2 and "--out" in message
