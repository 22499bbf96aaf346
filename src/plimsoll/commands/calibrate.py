"""`plimsoll calibrate RUN...`: fit the memory plan's few measured constants to ledgers.

Formulas are never fitted. Each constant is increased by the bytes by which measured peaks exceed
predicted peaks. The allocator's gap is measured as reserved / allocated - 1. A fitted value is the
median of a run's phases and processes, and then the median of the runs.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from itertools import starmap
from pathlib import Path
from statistics import median
from typing import Any

import yaml

from plimsoll.config.cluster import RANK_NAMES
from plimsoll.config.rollout import RolloutConfig
from plimsoll.errors import ConfigError
from plimsoll.machine.versions import installed_version
from plimsoll.memory.contents.overheads import Constants, read_plan_constants, write_constants
from plimsoll.page.ledger import Comparison, compare
from plimsoll.resolve.engine_rules import every_engine
from plimsoll.run.directory import existing_run
from plimsoll.run.ledger import read_ledger
from plimsoll.run.numbers import gigabytes_text, plural
from plimsoll.sampler.price import rollout_price

_RANKS = (*(f"{name} " for name in RANK_NAMES.values()), "local")
_PACKAGES = ("torch", "transformers", "ray")


@dataclass(frozen=True)
class CalibrationRun:
    """A run's predicted and measured peaks, and the constants that the run was planned with."""

    path: Path
    constants: Constants
    comparisons: tuple[Comparison, ...]
    engine_processes: int
    """Number of processes of one engine on CPU; 0 if the engines have no processes."""


def calibrate(paths: Sequence[Path], output: Path) -> str:
    """Write the fitted constants and their provenance to `output`, and return a summary as text.

    `paths` are run directories. Raises ConfigError if a path is no run, has no ledger or no plan,
    or if nothing can be fitted.
    """
    runs = [read_run(path) for path in paths]
    fits = fit_constants(runs)
    if not fits:
        raise ConfigError(
            f"{_names(runs)}: the ledgers hold no phase that was predicted, so nothing can be "
            "fitted. Give runs whose model has a plan."
        )
    measured = {name: value for name, (value, _) in fits.items()}
    constants = Constants().with_measured(provenance(runs), **measured)
    write_constants(constants, output)
    last_line = f"Written to {output}. The plan takes it with cluster.calibration: {output}"
    return "\n".join([*starmap(_describe_fit, fits.items()), last_line])


def read_run(path: Path) -> CalibrationRun:
    """Return the ledger and the constants of a run directory."""
    run = existing_run(path)
    rows = read_ledger(run.ledger_path)
    config = yaml.safe_load(run.config_path.read_text(encoding="utf-8"))
    constants = read_plan_constants(run.plan_path)
    return CalibrationRun(path, constants, tuple(compare(rows)), _engine_processes(config))


def _engine_processes(config: Mapping[str, Any]) -> int:
    """Return the number of one engine's processes: front, core, and workers if it is divided.

    Return 0 for an engine without processes, or a run without engines.
    """
    if "rollout" not in config:
        return 0
    engines = RolloutConfig.engine_types
    given = {name: settings for name, settings in config["rollout"].items() if name in engines}
    rollout = RolloutConfig.model_validate(given)
    if rollout_price(rollout).libraries != "engine_process":
        return 0
    return 2 + (rollout.parts if rollout.parts > 1 else 0)


def fit_constants(runs: Sequence[CalibrationRun]) -> dict[str, tuple[float, int]]:
    """Return the fitted value of each constant that was measured, and the number of readings."""
    fits = {}
    for name, values in _FITTED.items():
        if by_run := [measured for run in runs if (measured := list(values(run)))]:
            value = max(0.0, median(median(measured) for measured in by_run))
            rounded = round(value, 4) if name == "allocator_gap" else int(value)
            fits[name] = rounded, sum(map(len, by_run))
    return fits


ConstantValues = Callable[[CalibrationRun], Iterator[float]]
"""Takes a run; yields the values of one constant that the run's measurements suggest."""


def _missing_on_host(
    run: CalibrationRun, processes: str | tuple[str, ...], *, card: bool
) -> Iterator[float]:
    """Yield measured minus predicted bytes of host memory, for each phase of some processes.

    `processes` are beginnings of process names. `card` selects processes with, or without, a card.
    """
    with_card = {c.process for c in run.comparisons if c.measure == "device"}
    for c in run.comparisons:
        on_host = c.measure == "host" and c.process.startswith(processes)
        if on_host and c.predicted is not None and card == (c.process in with_card):
            yield c.measured - c.predicted


def _constant_values(name: str, processes: str | tuple[str, ...], *, card: bool) -> ConstantValues:
    """Return a function that yields the planned constant plus each excess of these processes."""

    def values(run: CalibrationRun) -> Iterator[float]:
        for missing in _missing_on_host(run, processes, card=card):
            yield getattr(run.constants, name) + missing

    return values


def _engine_process(run: CalibrationRun) -> Iterator[float]:
    for missing in _missing_on_host(run, "engine ", card=False) if run.engine_processes else ():
        yield run.constants.engine_process + missing / run.engine_processes


def _cuda_context(run: CalibrationRun) -> Iterator[float]:
    """Yield the bytes that a card shows as used beyond the bytes that torch reserved."""
    for measures in _by_phase(run).values():
        device, reserved = measures.get("device"), measures.get("reserved")
        if device and reserved and device.predicted is not None and reserved.predicted is not None:
            beside = device.measured - reserved.measured
            yield run.constants.cuda_context + beside - (device.predicted - reserved.predicted)


def _allocator_gap(run: CalibrationRun) -> Iterator[float]:
    for measures in _by_phase(run).values():
        allocated, reserved = measures.get("allocated"), measures.get("reserved")
        if allocated and reserved and allocated.measured:
            yield reserved.measured / allocated.measured - 1


_FITTED: Mapping[str, ConstantValues] = {
    # On a card, the bytes of CUDA's libraries cannot be separated from those of the process.
    "worker_process": _constant_values("worker_process", _RANKS, card=False),
    "cuda_libraries": _constant_values("cuda_libraries", _RANKS, card=True),
    "controller_process": _constant_values("controller_process", "controller", card=False),
    "engine_process": _engine_process,
    "cuda_context": _cuda_context,
    "allocator_gap": _allocator_gap,
}


def _by_phase(run: CalibrationRun) -> dict[tuple[str, str], dict[str, Comparison]]:
    """Return the comparisons by (process, phase) of ranks, and then by the name of the measure."""
    measures: dict[tuple[str, str], dict[str, Comparison]] = {}
    for c in run.comparisons:
        if c.process.startswith(_RANKS):
            measures.setdefault((c.process, c.phase), {})[c.measure] = c
    return measures


def provenance(runs: Sequence[CalibrationRun]) -> str:
    """Return a text with the runs, today's date, the machine and the installed versions."""
    engines = (package.name for rules in every_engine() for package in rules.packages)
    versions = {name: installed_version(name) for name in (*_PACKAGES, *engines)}
    installed = ", ".join(f"{name} {version}" for name, version in versions.items() if version)
    return (
        f"calibrated {date.today().isoformat()} on {_names(runs)}: {platform.node()}, "
        f"{platform.system()} {platform.machine()}, Python {platform.python_version()}, {installed}"
    )


def _names(runs: Sequence[CalibrationRun]) -> str:
    return ", ".join(str(run.path) for run in runs)


def _describe_fit(name: str, fit: tuple[float, int]) -> str:
    value, readings = fit
    text_of = "{:.1%}".format if name == "allocator_gap" else gigabytes_text
    numbers = f"{text_of(getattr(Constants(), name))} shipped, {text_of(value)} here"
    return f"{name:<19} {numbers}, from {plural(readings, 'reading')}"
