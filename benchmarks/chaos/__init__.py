"""Run a job again and again with random faults; disturb.py is its command.

An undisturbed run comes first: it notes every occasion for a fault, and is what the others are
compared with. Each further run has one fault, or several, drawn from the occasions by a seed.
What happened is kept in chaos.jsonl, so that the command can go on where it stopped.
"""

from __future__ import annotations

import json
import shlex
import shutil
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from fault_injection.points import POINTS

from chaos.compare import compare_runs
from chaos.draw import (
    RANDOM_KINDS,
    Occasion,
    draw_fault,
    noting_faults,
    occasions_of,
)
from chaos.table import TrialRow, differences, trial_cells
from chaos.trial import OUTPUT, DisturbedJob, FaultTrial, read_fired, run_trial
from plimsoll.errors import ConfigError, PlimsollError
from plimsoll.run.json_lines import append_row

TRIALS = "chaos.jsonl"
"""The file in the directory with a row for each disturbed run."""


@dataclass(frozen=True)
class ChaosRequest:
    """What is disturbed, and how."""

    words: Sequence[str]
    """The job's command: `grpo`, the config, flags."""
    directory: Path
    faults: int = 10
    """The number of faults in all; those that chaos.jsonl has already count."""
    at_once: int = 1
    """Faults in each run."""
    seed: int = 0
    kinds: Sequence[str] = RANDOM_KINDS
    points: Sequence[str] = ()
    """The points at which faults happen; empty: all that the run reaches."""
    patience: float = 600.0
    """Seconds without a new step after which a run is ended."""
    keep_runs: bool = False
    """Whether the directories of runs that ended right are kept."""


def run_chaos(request: ChaosRequest, show: Callable[[str], None]) -> list[TrialRow]:
    """Disturb a job until all faults have happened; return a row for each run.

    Raises:
        ConfigError: A kind or a point does not exist, or the run does not reach it.
        PlimsollError: The undisturbed run failed.
    """
    _check_names("--kinds", request.kinds, RANDOM_KINDS)
    _check_names("--points", request.points, [*POINTS])
    _check_words(request.words)
    occasions = _occasions(request, show)
    path = request.directory / TRIALS
    lines = path.read_text().splitlines() if path.is_file() else []
    rows: list[TrialRow] = [json.loads(line) for line in lines]
    for number in range(len(rows), -(-request.faults // request.at_once)):
        first = number * request.at_once
        drawn = [
            draw_fault(first + i, request.seed, request.kinds, occasions)
            for i in range(request.at_once)
        ]
        rows.append(_disturb(request, number, ",".join(drawn)))
        append_row(path, dict(rows[-1]))
        show("  ".join(trial_cells(rows[-1])))
    return rows


def _check_names(option: str, names: Sequence[str], known: Sequence[str]) -> None:
    for name in names:
        if name not in known:
            raise ConfigError(f"{option}: there is no {name!r}. There are: {', '.join(known)}.")


def _check_words(words: Sequence[str]) -> None:
    for word in words:
        if word.partition("=")[0] in ("--run.directory", "--run.resume"):
            raise ConfigError(
                f"{word.partition('=')[0]}: chaos sets it, since each run has a directory of its "
                "own. Leave it out; --directory says where they are."
            )


def _occasions(request: ChaosRequest, show: Callable[[str], None]) -> list[Occasion]:
    """Return the occasions of the undisturbed run, which is made if it is not there yet."""
    run, record = _undisturbed(request), request.directory / "undisturbed-faults"
    done, command = record / "done", shlex.join(request.words)
    if not done.exists():
        show(f"the undisturbed run: {run}")
        shutil.rmtree(record, ignore_errors=True)
        shutil.rmtree(run, ignore_errors=True)
        trial = run_trial(_job(request, starts=1), run, noting_faults(), record)
        if trial.code != 0:
            output = record / OUTPUT
            last = "\n  ".join(output.read_text(errors="replace").splitlines()[-3:])
            raise PlimsollError(
                "the undisturbed run failed, so there is nothing to compare with. Correct the run: "
                f"plimsoll {command}\n  {last}\n  All that it said: {output}"
            )
        done.write_text(command)
    if done.read_text() != command:
        raise ConfigError(
            f"--directory: {request.directory} holds runs of `plimsoll {done.read_text()}`, which "
            f"those of `plimsoll {command}` cannot be compared with. Give another directory."
        )
    wanted = request.points or [*POINTS]
    return [o for o in occasions_of(read_fired(record)) if o.point in wanted]


def _undisturbed(request: ChaosRequest) -> Path:
    return request.directory / "undisturbed"


def _job(request: ChaosRequest, starts: int) -> DisturbedJob:
    return DisturbedJob(request.words, request.patience, starts)


def _disturb(request: ChaosRequest, number: int, faults: str) -> TrialRow:
    """Run the job with faults, and return the row about it."""
    run, record = (request.directory / f"{what}-{number:04d}" for what in ("run", "faults"))
    for leftover in (run, record):  # of a command that was stopped
        shutil.rmtree(leftover, ignore_errors=True)
    trial: FaultTrial = run_trial(_job(request, starts=request.at_once + 2), run, faults, record)
    likeness = compare_runs(run, _undisturbed(request))
    row = {"number": number, "faults": faults} | asdict(trial) | {"differs": asdict(likeness)}
    if trial.code == 0 and not differences(row) and not request.keep_runs:
        shutil.rmtree(run, ignore_errors=True)
    return row
