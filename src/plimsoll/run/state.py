"""What a run needs to go on where it stopped, beside weights and optimizer states; its best
evaluation among it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from math import isnan
from pathlib import Path
from typing import Any

from plimsoll.config.run import BestConfig
from plimsoll.errors import ConfigError
from plimsoll.run.files import write_whole


@dataclass(frozen=True)
class SourceState:
    """What a source of the data gave a run.

    asked: a fingerprint of the settings that choose its rows and make tokens of them. rows: the
    usable ones. content: a fingerprint of what was made of these, in their order.
    """

    asked: str
    rows: int
    content: str


@dataclass(frozen=True)
class RunState:
    """Where a run stands after a step.

    step: the last step that was completed; 0 before the first.
    data_position: rows drawn from the data so far, over all epochs. data_rows: how many usable rows
    the data had, on which their order depends.
    weight_version: the version of the weights that the step produced.
    kl_coefficient: the weight of the KL that the next step uses (0 where there is none).
    seconds: the time that the run took so far, over all its parts.
    best, best_step: the best evaluation's value, None before the first, and its step.
    evaluations_since_best: evaluations in a row that were not better.
    sources: of the data, by their keys in the config; None where an older version wrote the state.
    rewards: the running statistics of rewards that are normalised, by their names.
    """

    step: int
    data_position: int
    data_rows: int
    weight_version: int
    kl_coefficient: float
    seconds: float
    best: float | None = None
    best_step: int = 0
    evaluations_since_best: int = 0
    sources: Mapping[str, SourceState] | None = None
    rewards: Mapping[str, Mapping[str, float]] = field(default_factory=dict)

    def save(self, path: Path) -> None:
        """Write the state as a JSON object."""
        write_whole(path, json.dumps(asdict(self), indent=2) + "\n")

    @classmethod
    def load(cls, path: Path) -> RunState:
        """Read what `save` wrote.

        Raises ConfigError naming the file where a field is missing, unknown or of a wrong type.
        """
        values = _read_object(path)
        sources = _sources(path, values.pop("sources", None))
        rewards = _rewards(path, values.pop("rewards", {}))
        kinds = {f.name: str(f.type) for f in fields(cls) if f.name not in ("sources", "rewards")}
        if missing := sorted(kinds.keys() - values.keys()):
            raise _broken(path, f"missing fields: {', '.join(missing)}")
        if unknown := sorted(values.keys() - kinds.keys()):
            raise _broken(path, f"unknown fields: {', '.join(unknown)}")
        numbers = {name: _number(path, name, values[name], kinds[name]) for name in kinds}
        return cls(**numbers, sources=sources, rewards=rewards)


def after_evaluation(config: BestConfig, state: RunState, metrics: Mapping[str, float]) -> RunState:
    """The state with the evaluation of its step taken into account. NaN is never better.

    Raises:
        ConfigError: the evaluation has no metric of the name.
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
    """Whether the run has to end early."""
    if config is None or config.patience is None:
        return False
    return state.evaluations_since_best >= config.patience


def _rewards(path: Path, values: object) -> dict[str, dict[str, float]]:
    if not isinstance(values, dict) or not all(isinstance(own, dict) for own in values.values()):
        raise ConfigError(f"{path}: `rewards` is {values!r}, and an object of objects is needed.")
    return {
        name: {key: float(_number(path, key, value, "float")) for key, value in own.items()}
        for name, own in values.items()
    }


def _read_object(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise _broken(path, f"it cannot be read ({error.strerror})") from error
    except ValueError as error:
        raise _broken(path, f"it is not JSON ({error})") from error
    if not isinstance(values, dict):
        raise _broken(path, f"it holds {type(values).__name__}, not an object")
    return values


def _sources(path: Path, value: Any) -> dict[str, SourceState] | None:
    if value is None:
        return None
    try:
        return {str(key): SourceState(**source) for key, source in value.items()}
    except (AttributeError, TypeError) as error:
        raise _broken(path, f"sources is {value!r}") from error


def _number(path: Path, name: str, value: Any, kind: str) -> Any:
    """kind: int, float, or float | None."""
    if value is None and kind.endswith("None"):
        return None
    is_whole = isinstance(value, int) and not isinstance(value, bool)
    if not (is_whole or (kind != "int" and isinstance(value, float))):
        raise _broken(path, f"{name} is {value!r}, and must be a number ({kind})")
    return value if kind == "int" else float(value)


def _broken(path: Path, why: str) -> ConfigError:
    return ConfigError(
        f"{path} is no run state of this version: {why}. "
        f"Resume from another checkpoint (remove this one), or start a new run.directory."
    )
