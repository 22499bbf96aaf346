"""The interface of engines before anything is loaded: rules, needs, and words for people.

Each engine's folder has a `rules.py` with the value RULES; no file of spec/ names an engine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from plimsoll.config.base import Settings
from plimsoll.config.cluster import Device
from plimsoll.config.engine import FrozenRole, TrainedRole
from plimsoll.config.engines import ROLLOUT_ENGINES, TRAINER_ENGINES, folder_value, name_of
from plimsoll.config.problems import Problem
from plimsoll.config.rollout import RolloutConfig
from plimsoll.machine.local_host import LocalHost
from plimsoll.machine.versions import PACKAGES, Package

if TYPE_CHECKING:
    from plimsoll.spec.run_spec import RunSpec

INSTALL_EXTRA = "install plimsoll-rl with its extra `cpu` or `gpu`"


class PackageNeed(NamedTuple):
    """A Python package that a setting needs."""

    package: str
    key: str
    value: str
    instead: str
    """The setting to write instead, which needs no package."""
    install: str = INSTALL_EXTRA
    """How to install the package."""


class ToolNeed(NamedTuple):
    """Tools of the system that a part of a run compiles with at its first use."""

    tools: Sequence[str]
    key: str
    value: str
    what: str
    """The part of the run that compiles, for messages."""
    instead: str
    """The setting to write instead, which needs no tools."""


class Compiled(NamedTuple):
    """A part of an engine that tools of the system compile at its first use."""

    what: str
    tools: Sequence[str]
    devices: Sequence[Device]
    """The kinds of machine on which that happens."""


@dataclass(frozen=True)
class Installed:
    """What `plimsoll doctor` shows an engine of a machine."""

    versions: Mapping[str, str | None]
    """The version of each known package; None if it is not installed."""
    tools: Mapping[str, str | None]
    """As `system_tools` finds them."""
    has_gpus: bool
    """Whether the machine has GPUs."""
    has_cuda_build: bool
    """Whether torch is a build for CUDA."""


def _find_nothing(seen: Installed) -> Iterator[Problem]:
    return iter(())


@dataclass(frozen=True)
class TrainerRules:
    """The rules of a trainer engine for the roles that it trains or holds.

    Attributes:
        settings: problems between settings, found without the hardware.
        plan: problems that show once it is known what the run computes on.
        tools: what the engine compiles with.
        host: problems of the machine at hand.
        packages: Python packages that every run with the engine imports, with their versions.
        offloaded: keys of a role, without the role's name, that move something to host memory.
        describe: how a role is divided and where it waits, in a few words.
        decide: the settings of a role that learns, with nothing left to `auto`; the role's model is
            decided already.
        measuring: the settings of a frozen copy of a role that learns, divided as that role is.
        doctor: findings about what is installed.
        compiled: what is compiled.
    """

    settings: Callable[[RunSpec[Any]], Iterator[Problem]]
    plan: Callable[[RunSpec[Any], Device], Iterator[Problem]]
    tools: Callable[[RunSpec[Any]], Iterator[ToolNeed]]
    host: Callable[[RunSpec[Any], LocalHost], Iterator[Problem]]
    packages: tuple[Package, ...]
    offloaded: Callable[[TrainedRole | FrozenRole], tuple[str, ...]]
    describe: Callable[[TrainedRole | FrozenRole], str]
    decide: Callable[[TrainedRole], Settings]
    measuring: Callable[[TrainedRole], Settings]
    doctor: Callable[[Installed], Iterator[Problem]] = _find_nothing
    compiled: tuple[Compiled, ...] = ()


@dataclass(frozen=True)
class RolloutRules:
    """The rules of an engine that samples.

    Attributes:
        title: the engine's name for people.
        where: the values of cluster.where with which it can sample.
        package: the module that it imports.
        packages: the distributions that bring that module, or on which it depends, with their
            versions; none if Plimsoll itself needs the module.
        settings: problems between settings.
        model: problems of the heads and layers of a model that is on the disk. Args: run, key of
            the model, its path.
        files: problems of other files that the settings name.
        tools: what the engine compiles with.
        host: problems of the machine at hand.
        start: problems that show once it is known what the run computes on.
        adapter_room: the rank for which engines make room for an adapter beside their model; None
            if they get merged weights.
        install: how to install the module.
        doctor: findings about what is installed.
        compiled: what is compiled.
        shortages: what the engine's errors say if memory was too little, as parts of sentences.
    """

    title: str
    where: tuple[str, ...]
    package: str
    packages: tuple[Package, ...]
    settings: Callable[[RunSpec[Any]], Iterator[Problem]]
    model: Callable[[RunSpec[Any], str, str], Iterator[Problem]]
    files: Callable[[RunSpec[Any]], Iterator[Problem]]
    tools: Callable[[RunSpec[Any]], Iterator[ToolNeed]]
    host: Callable[[RunSpec[Any], LocalHost], Iterator[Problem]]
    start: Callable[[RunSpec[Any], Device], Iterator[Problem]]
    adapter_room: Callable[[RunSpec[Any]], int | None]
    install: str = INSTALL_EXTRA
    doctor: Callable[[Installed], Iterator[Problem]] = _find_nothing
    compiled: tuple[Compiled, ...] = ()
    shortages: tuple[str, ...] = ()


def other_engines(rollout: RolloutConfig) -> str:
    """Return the engines that a run could sample with instead, as they are written."""
    others = (name for name in rollout.engine_types if name != rollout.engine_name)
    return " or ".join(f"rollout: {{{name}: {{}}}}" for name in others)


def trainer_engines() -> dict[str, TrainerRules]:
    """Return the rules of all engines that train, by the engines' names."""
    return {name_of(package): folder_value(package, "rules") for package in TRAINER_ENGINES}


def rollout_engines() -> dict[str, RolloutRules]:
    """Return the rules of all engines that sample, by the engines' names."""
    return {name_of(package): folder_value(package, "rules") for package in ROLLOUT_ENGINES}


def every_engine() -> tuple[TrainerRules | RolloutRules, ...]:
    """Return the rules of all engines, those that train first."""
    return (*trainer_engines().values(), *rollout_engines().values())


def known_packages() -> tuple[Package, ...]:
    """Return the packages of Plimsoll itself and of all engines."""
    return (*PACKAGES, *(package for rules in every_engine() for package in rules.packages))


def engine_for(where: str) -> str:
    """Return the name of the first engine that samples with this value of cluster.where."""
    return next(name for name, rules in rollout_engines().items() if where in rules.where)


def rollout_rules(rollout: RolloutConfig) -> RolloutRules:
    """Return the rules of the engine that the settings name."""
    return cast(RolloutRules, rollout.engine_value("rules"))


def engine_rules(spec: RunSpec[Any]) -> tuple[RolloutRules, ...]:
    """Return the rules of the run's engine that samples; () if the run starts none."""
    return () if spec.engines is None else (rollout_rules(spec.engines),)


def check_engine_model(spec: RunSpec[Any], key: str, path: str) -> Iterator[Problem]:
    """Yield what the engines cannot do with a model; `key` is the one that gives its path."""
    for rules in engine_rules(spec):
        yield from rules.model(spec, key, path)


def all_rules(spec: RunSpec[Any]) -> tuple[TrainerRules | RolloutRules, ...]:
    """Return the rules of all engines of a run, those that train first."""
    return (*trainers_of(spec), *engine_rules(spec))


def trainer_rules(role: TrainedRole | FrozenRole) -> TrainerRules:
    """Return the rules of the engine of a role."""
    return cast(TrainerRules, role.engine_value("rules"))


def trainers_of(spec: RunSpec[Any]) -> tuple[TrainerRules, ...]:
    """Return the rules of each trainer engine of a run, in the order of the roles."""
    roles: list[TrainedRole | FrozenRole] = [*spec.trained.values(), *spec.frozen.values()]
    return tuple({role.engine_name: trainer_rules(role) for role in roles}.values())
