"""`plimsoll report` and `plimsoll calibrate` on what is no run, and asked for help."""

from __future__ import annotations

from pathlib import Path

import pytest

from plimsoll.cli import main


@pytest.mark.parametrize("command", ["report", "calibrate"])
def test_a_directory_without_a_run_is_refused_in_one_line(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([command, str(tmp_path / "gone")]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: {tmp_path}/gone ") and "run.directory" in line
    assert main([command, str(tmp_path)]) == 2
    assert "ledger.jsonl is not there" in capsys.readouterr().err
    assert main([command]) == 2
    assert f"`plimsoll {command} --help`" in capsys.readouterr().err
