"""The state that a run needs to resume, in addition to weights and optimizer states."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from math import isnan
from pathlib import Path
from typing import ClassVar

from pydantic import ConfigDict, TypeAdapter, ValidationError
from pydantic_core import ErrorDetails

from plimsoll import __version__
from plimsoll.config.run import BestConfig
from plimsoll.errors import ConfigError
from plimsoll.run.files import write_whole

STATE_VERSION = 3
"""Version of the file's format. A new field raises it, and has a default for older files. Files
without a version are of version 1."""


@dataclass(frozen=True)
class SourceState:
    """Fingerprints of the data that a source gave a run."""

    asked: str
    """Fingerprint of the settings that select rows and tokenize them."""
    rows: int
    """Number of usable rows."""
    content: str
    """Fingerprint of the tokenized rows, in order."""


@dataclass(frozen=True)
class RunState:
    """The state of a run after an optimizer step."""

    __pydantic_config__: ClassVar = ConfigDict(extra="forbid")
    step: int
    """Last completed step; 0 before the first."""
    data_position: int
    """Number of rows drawn from the data so far, in all epochs, without the `unlearned` ones."""
    data_rows: int
    """Number of usable rows of the data. The order of rows depends on it."""
    weight_version: int
    """Version of the weights that the step produced."""
    kl_coefficient: float
    """Weight of the KL in the next step; 0 if there is none."""
    seconds: float
    """Seconds of the run so far, including those before it was resumed."""
    best: float | None = None
    """Value of the best evaluation; None before the first."""
    best_step: int = 0
    evaluations_since_best: int = 0
    """Evaluations in a row that were not better."""
    sources: Mapping[str, SourceState] | None = None
    """Sources of data by their keys in the config; None in files of older versions."""
    rewards: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    """Running statistics of normalised rewards, by name."""
    unlearned: tuple[int, ...] = ()
    """Places, in the order of the data, of prompts that engines were sampling while the step was
    made. A resumed run samples them first. The next new prompt follows after all of these."""
    versions: Mapping[str, str] = field(default_factory=dict)
    """Versions of the libraries that made the tokens, by name; empty in files of older versions."""

    @property
    def next_place(self) -> int:
        """Place of the next row that was never drawn."""
        return self.data_position + len(self.unlearned)

    def save(self, path: Path) -> None:
        """Write the state as a JSON object."""
        fields = {"version": STATE_VERSION, **asdict(self)}
        write_whole(path, json.dumps(fields, indent=2) + "\n")

    @classmethod
    def load(cls, path: Path) -> RunState:
        """Return the state that `save` of this version or an older one wrote.

        Raises ConfigError if a field is wrong, or a newer version wrote the file.
        """
        try:
            content = path.read_bytes()
            version = TypeAdapter(_Format).validate_json(content, strict=True).version
            if version > STATE_VERSION:
                raise _newer(path, version)
            fields = json.loads(content)
            fields.pop("version", None)
            return TypeAdapter(cls).validate_json(json.dumps(fields), strict=True)
        except OSError as error:
            raise _broken(path, f"it cannot be read ({error.strerror})") from error
        except ValidationError as error:
            raise _broken(path, "; ".join(map(_describe, error.errors()))) from error


@dataclass(frozen=True)
class _Format:
    """The field of the file that says how to read the others."""

    version: int = 1


def after_evaluation(config: BestConfig, state: RunState, metrics: Mapping[str, float]) -> RunState:
    """Return the state after an evaluation, with a new best value if the metric is better.

    NaN is never better. Raises ConfigError if the evaluation gave no such metric.
    """
    if config.metric not in metrics:
        names = ", ".join(sorted(name for name in metrics if name.startswith("eval/")))
        raise ConfigError(
            f"run.best.metric {config.metric!r} is none of what the evaluation gave: {names}. "
            "Write one of these."
        )
    value = metrics[config.metric]
    if _is_better(config, value, state.best):
        return replace(state, best=value, best_step=state.step, evaluations_since_best=0)
    return replace(state, evaluations_since_best=state.evaluations_since_best + 1)


def _is_better(config: BestConfig, value: float, best: float | None) -> bool:
    if best is None:
        return not isnan(value)
    gain = best - value if config.goal == "lowest" else value - best
    return gain > config.min_delta


def is_patience_out(config: BestConfig | None, state: RunState) -> bool:
    """Return whether the run must end early: `patience` evaluations in a row were not better."""
    if config is None or config.patience is None:
        return False
    return state.evaluations_since_best >= config.patience


def _describe(error: ErrorDetails) -> str:
    """Return a text with an error's field, its value (unless missing) and its message."""
    name = ".".join(map(str, error["loc"])) or "the file"
    value = "" if error["type"] == "missing" else f" is {error['input']!r}"
    return f"{name}{value}: {error['msg']}"


def _newer(path: Path, version: int) -> ConfigError:
    return ConfigError(
        f"{path} has version {version}, and this Plimsoll ({__version__}) reads versions up to "
        f"{STATE_VERSION}: a newer Plimsoll wrote it. Resume with that one (run.log begins each "
        f"part of a run with its version), or with a newer one."
    )


def _broken(path: Path, why: str) -> ConfigError:
    return ConfigError(
        f"{path} is no run state of this version: {why}. "
        f"Resume from another checkpoint (remove this one), or start a new run.directory."
    )
