"""How a run ended, as it is written down, and what a failure says of going on."""

from __future__ import annotations

import errno
from collections import namedtuple
from pathlib import Path

import pytest

from plimsoll.cli.command import _describe_error, _show_unexpected
from plimsoll.config.run import RunConfig
from plimsoll.errors import (
    CannotWrite,
    ConfigError,
    Interrupted,
    PlimsollError,
    WorkerDied,
    WorkerFailed,
)
from plimsoll.run.directory import RunDirectory, open_run
from plimsoll.run.ending import RunEnd, how_to_go_on, notes_of, read_end, recording_end
from plimsoll.run.json_lines import append_row
from plimsoll.run.output import RunLog
from plimsoll.run.phases import CurrentPhase, write_current_phase

RUN_AGAIN = "run the same command with --run.resume auto"


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    return RunDirectory(tmp_path)


def end_of(run: RunDirectory, error: BaseException | None) -> RunEnd:
    """End the run with an error, or without one."""

    def work() -> None:
        if error is not None:
            raise error

    log = RunLog(run.log_path)
    if error is None:
        with recording_end(run, log):
            work()
    else:
        with pytest.raises(type(error)) as passed, recording_end(run, log):
            work()
        assert passed.value is error
    found = read_end(run.end_path)
    assert found is not None
    return found


def test_a_run_that_ends_well_is_done(run: RunDirectory) -> None:
    end = end_of(run, None)
    assert (end.how, end.why, str(end)) == ("done", "", "done")
    assert not run.log_path.exists()


def test_a_run_that_was_asked_to_stop_is_stopped(run: RunDirectory) -> None:
    error = Interrupted("stopped after step 3, as asked")
    end = end_of(run, error)
    assert (end.how, end.why, str(end)) == ("stopped", str(error), "stopped")
    assert run.log_path.read_text()[20:] == f"{error}\n" and notes_of(error) == []


def test_a_run_that_is_stopped_at_once_shows_what_it_waited_for(run: RunDirectory) -> None:
    error = KeyboardInterrupt()
    end = end_of(run, error)
    assert (end.how, end.why) == ("stopped", "interrupted")
    log = run.log_path.read_text()
    assert ", in work\n" in log and log.endswith(" KeyboardInterrupt\n") and notes_of(error) == []


def test_a_failure_names_the_checkpoint_and_the_log_has_the_traceback(run: RunDirectory) -> None:
    append_row(run.metrics_path, {"step": 11})
    for step in (5, 10):
        run.checkpoint_path(step).mkdir(parents=True)
    error = WorkerDied("training rank 1 died\n  Why: it was killed")
    end = end_of(run, error)
    assert str(end) == "failed: training rank 1 died"
    message, exit_code = _describe_error(error)
    first, why, saved, log_line = message.splitlines()
    assert (first, why) == ("error: training rank 1 died", "  Why: it was killed")
    assert f"{run.path}/checkpoints/step-000010" in saved
    assert "step 10" in saved and saved.endswith(RUN_AGAIN)
    assert log_line.endswith(f": {run.path}/run.log") and exit_code == 1
    log = run.log_path.read_text()
    assert "Traceback (most" in log and ", in work\n" in log
    assert log.endswith(f"{saved}\n")


def test_a_missing_checkpoint_is_reported_only_if_the_directory_would_be_refused(
    run: RunDirectory,
) -> None:
    assert how_to_go_on(run) == ""
    append_row(run.metrics_path, {"step": 1})
    message = how_to_go_on(run)
    assert "run.save_every" in message and message.endswith(RUN_AGAIN)


def test_a_wrong_setting_needs_no_traceback(run: RunDirectory) -> None:
    error = ConfigError("data.train has no rows")
    assert str(end_of(run, error)) == "failed: data.train has no rows"
    assert notes_of(error) == []


def test_an_unexpected_error_points_to_its_traceback(
    run: RunDirectory, capsys: pytest.CaptureFixture[str]
) -> None:
    error = KeyError("reward")
    assert str(end_of(run, error)) == "failed: unexpected KeyError: 'reward'"
    _show_unexpected(type(error), error, error.__traceback__)
    first, second = capsys.readouterr().err.splitlines()
    assert first.startswith("error: unexpected KeyError: 'reward'")
    assert second.endswith(f" traceback: {run.path}/run.log")


def test_an_end_that_cannot_be_written_does_not_hide_the_error(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    gone = RunDirectory(tmp_path / "file" / "run")
    error = PlimsollError("why")
    with pytest.raises(PlimsollError, match="why"), recording_end(gone, RunLog(gone.log_path)):
        raise error
    assert notes_of(error) == []  # there is no log to look at
    assert "Cannot write" in capfd.readouterr().err


DISK = namedtuple("DISK", "total used free")


def fill_disk(monkeypatch: pytest.MonkeyPatch, free: int = 512) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda path: DISK(10**9, 10**9 - free, free))


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, "No space left on device"),
        RuntimeError("PytorchStreamWriter failed writing file data/0: file write failed"),
        FileNotFoundError(errno.ENOENT, "No usable temporary directory found in ['/tmp']"),
        WorkerFailed("rank 0 failed\n  Why: OSError: [Errno 28] No space left on device"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_a_full_disk_is_named_whatever_the_error(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    fill_disk(monkeypatch)
    with pytest.raises(CannotWrite, match="disk is full"), recording_end(run, RunLog(run.log_path)):
        raise error
    end = read_end(run.end_path)
    assert end is not None and "the disk is full" in end.why and end.fault == "none"
    assert type(error).__name__ in run.log_path.read_text()


def test_an_error_with_room_on_the_disk_stays_as_it_is(run: RunDirectory) -> None:
    end_of(run, RuntimeError("PytorchStreamWriter failed writing file"))


def test_a_full_disk_has_room_for_the_end_in_the_file_of_the_phase(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path, content: str) -> None:
        raise CannotWrite("full")

    write_current_phase(run.now_path, CurrentPhase(3, 10, "save"))
    monkeypatch.setattr("plimsoll.run.ending.write_whole", refuse)
    end = end_of(run, PlimsollError("why"))
    assert (end.why, end.step) == ("why", 3) and not run.now_path.exists()


def test_an_end_is_of_the_last_part_alone(run: RunDirectory) -> None:
    assert read_end(run.end_path) is None
    end_of(run, PlimsollError("why"))
    with open_run(RunConfig(directory=str(run.path), steps=3, resume="auto")):
        assert read_end(run.end_path) is None
        assert "why" in run.log_path.read_text()
    run.end_path.write_text('{"how": "do')
    assert read_end(run.end_path) is None


def test_an_end_holds_no_secret_of_this_processs_environment(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who reads it later does not have the variable."""
    monkeypatch.setenv("MY_API_KEY", "abcdefgh-ijklmnop")
    end = end_of(run, PlimsollError("The judge refused abcdefgh-ijklmnop."))
    assert "***" in end.why and "abcdefgh" not in run.end_path.read_text()
