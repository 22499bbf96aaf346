"""Predicted against measured memory of real runs on this machine, process by process.

    python benchmarks/memory_runs.py [--all] [--only WORDS] [--folder FOLDER] [--tensors]

Each run is the command itself, one at a time. A process's peak is its largest resident memory over
all phases, by the ledger; predicted is the plan's figure for that process. Runs that a folder
already holds are not made again. --tensors: instead, runs of one rank with the bytes of live
tensors counted, against the plan's tensors alone.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from io import StringIO
from itertools import groupby
from pathlib import Path
from typing import Any

import yaml

from plimsoll.commands.planning import constants_of, hardware_of, predict_peaks
from plimsoll.config.run import JobConfig
from plimsoll.jobs import JOBS
from plimsoll.jobs.which import spec_of
from plimsoll.memory.contents.contents import contents_of, make_job
from plimsoll.memory.contents.stores import Use, uses_of
from plimsoll.page.ledger import Comparison, compare
from plimsoll.resolve.run_spec import Phase, RunSpec
from plimsoll.run.ledger import read_ledger
from plimsoll.run.readings import Planned
from plimsoll.shapes.known_models import read_shape
from plimsoll.trainer.zero.settings import deepspeed_settings, trained_counts, zero_sizes
from run_cases import CASES, QUICK, RunCase, write_model, write_rows


@dataclass(frozen=True)
class Found:
    """One process of a run (or its tensors); phase: of the measured peak. Bytes."""

    case: RunCase
    process: str
    phase: str
    predicted: int
    measured: int

    @property
    def error(self) -> float:
        """Of the prediction, as a share of the peak; below 0 is too low."""
        return self.predicted / self.measured - 1

    def __str__(self) -> str:
        sizes = f"{self.predicted / 1e9:.2f} GB", f"{self.measured / 1e9:.2f} GB"
        return _line(self.case.name, self.process, self.phase, *sizes, f"{self.error:.1%}")


def _line(run: str, process: str, phase: str, predicted: str, measured: str, error: str) -> str:
    return f"{run:<32}{process:<10}{phase:<13}{predicted:>10}{measured:>10}{error:>8}"


def main() -> int:
    arguments = _arguments()
    chosen = [case for case in CASES if _wanted(case, arguments)]
    with tempfile.TemporaryDirectory() as temporary:
        home = Path(arguments.folder or temporary).absolute()
        home.mkdir(parents=True, exist_ok=True)
        write_rows(home / "rows.jsonl")
        print(_line("run", "process", "peak in", "predicted", "measured", "error"))
        found = list(_all(chosen, home, tensors=arguments.tensors))
    if not found:
        print("memory_runs: no such case", file=sys.stderr)
        return 2
    print(summary(found))
    return 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--all", action="store_true", help=f"all {len(CASES)} runs")
    parser.add_argument("--only", metavar="WORDS", help="runs whose name has these words")
    parser.add_argument("--folder", help="keep models and runs here; default: nowhere")
    parser.add_argument("--tensors", action="store_true", help="count live tensors instead")
    return parser.parse_args()


def _wanted(case: RunCase, arguments: argparse.Namespace) -> bool:
    if arguments.tensors and case.where == "ray":
        return False
    if arguments.only is not None:
        return arguments.only in case.name
    return arguments.all or case.name in QUICK


def _all(cases: Iterable[RunCase], home: Path, tensors: bool) -> Iterator[Found]:
    for case in cases:
        write_model(home, case.size, case.checkpoint)
        for one in [run_tensors(case, home)] if tensors else run_case(case, home):
            print(one, flush=True)
            yield one


def run_case(case: RunCase, home: Path) -> list[Found]:
    """Run it, unless it has been run; each process at its peak.

    Raises RuntimeError with what the command said where it failed.
    """
    config = case.config(home)
    directory = Path(config["run"]["directory"])
    if not (directory / "model").exists():
        _run(case, config, home)
    rows = [one for one in compare(read_ledger(directory / "ledger.jsonl")) if _counts(one)]
    predicted = predict_peaks(spec_of(_validated(case, home)))
    return [
        _found(case, name, predicted[name].values(), list(own))
        for name, own in groupby(rows, key=lambda one: one.process)
    ]


def _counts(one: Comparison) -> bool:
    return one.measure == "host" and not one.process.startswith("node ")


def _found(case: RunCase, name: str, predicted: Iterable[Any], own: Sequence[Comparison]) -> Found:
    peak = max(own, key=lambda one: one.measured)
    return Found(case, name, peak.phase, max(one.host for one in predicted), peak.measured)


def _run(case: RunCase, config: dict[str, Any], home: Path) -> None:
    path = home / f"{case.slug}.yaml"
    path.write_text(yaml.safe_dump(config))
    shutil.rmtree(config["run"]["directory"], ignore_errors=True)
    done = subprocess.run(
        [sys.executable, "-m", "plimsoll", case.job, str(path), "--force"],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"{case.name} failed:\n{done.stderr}")


def _validated(case: RunCase, home: Path) -> JobConfig:
    config: JobConfig = JOBS[case.job].config.model_validate(case.config(home))
    return config


def run_tensors(case: RunCase, home: Path) -> Found:
    """The most bytes that live tensors have at once, in a process of its own."""
    context = multiprocessing.get_context("spawn")
    with context.Pool(1) as pool:
        measured: int = pool.apply(_count_tensors, (case, home))
    phase, predicted = predicted_tensors(_validated(case, home))
    return Found(case, "tensors", phase, predicted, measured)


def predicted_tensors(config: JobConfig) -> tuple[Phase, int]:
    """When a local run's tensors are most, by the plan, and their bytes."""
    spec = spec_of(config)
    job = make_job(spec, hardware_of(spec.cluster), constants_of(spec.cluster))
    (process,) = job.layout.processes
    uses, rest = uses_of(contents_of(job, process)), _untouched(spec)
    sizes = [use.allocated + rest * _has_bucket(use) for use in uses]
    largest = max(sizes)
    return uses[sizes.index(largest)].moment.phase, largest


def _has_bucket(use: Use) -> bool:
    return any(item.name == "reduce bucket" for item in use.items)


def _untouched(spec: RunSpec[Any]) -> int:
    """Return the bytes of a gradient bucket that a small model never fills: they are in the tensor,
    not in memory."""
    role = spec.actor
    shape = read_shape(role.model.path)
    sizes = zero_sizes(deepspeed_settings(role, "cpu", 1), 1)
    counts = trained_counts(role, shape, spec.roles["actor"].head, sizes)
    return max(0, counts.element * (sizes.bucket - counts.trained))


def _count_tensors(case: RunCase, home: Path) -> int:
    """Of a run in this process. Tensors without storages of their own (views) count nothing."""
    from traced_bytes import LiveBytes

    config = _validated(case, home)
    directory = f"{config.run.directory}-tensors"
    shutil.rmtree(directory, ignore_errors=True)
    config = config.model_copy(
        update={"run": config.run.model_copy(update={"directory": directory})}
    )
    spec = spec_of(config)
    with redirect_stdout(StringIO()), LiveBytes() as live:
        live.enter("run")
        spec.job.load_loop().run(spec, Planned())
    peak: int = live.peaks["run"]
    return peak


def summary(found: Sequence[Found]) -> str:
    """Median error, and the worst both ways."""
    low = min(found, key=lambda one: one.error)
    high = max(found, key=lambda one: one.error)
    median = statistics.median(abs(one.error) for one in found)
    return (
        f"{len({one.case.name for one in found})} runs, {len(found)} processes: median error "
        f"{median:.1%}, worst under {low.error:.1%} ({low.case.name}, {low.process}), worst over "
        f"{high.error:+.1%} ({high.case.name}, {high.process})"
    )


if __name__ == "__main__":
    sys.exit(main())
