"""The part of engines that works before anything is loaded: rules, needs, and descriptions.

Each engine's folder has a `rules.py` with the value RULES; no file of resolve/ names an engine.
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
    from plimsoll.resolve.run_spec import RunSpec

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
    """Tools of the system with which a part of a run is compiled at its first use."""

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
    """The devices for which that happens."""


@dataclass(frozen=True)
class Installed:
    """Facts about a machine that `plimsoll doctor` passes to the rules of each engine."""

    versions: Mapping[str, str | None]
    """The version of each known package; None if it is not installed."""
    tools: Mapping[str, str | None]
    """The path of each tool, or None; see `system_tools`."""
    has_gpus: bool
    """Whether the machine has GPUs."""
    has_cuda_build: bool
    """Whether torch is a build for CUDA."""


def find_nothing(*seen: object) -> Iterator[Any]:
    """Find no problem and no need, as the rules of an engine that has none."""
    return iter(())


@dataclass(frozen=True, kw_only=True)
class TrainerRules:
    """The rules of a trainer engine for the roles that it trains or holds.

    Attributes:
        settings: yields problems between settings; needs no hardware.
        plan: yields problems that depend on the device of the run.
        tools: yields the system tools that the engine compiles with.
        host: yields problems of the local machine.
        packages: Python packages that every run with the engine imports, with their versions.
        offloaded: returns the keys (inside a role's section) that move something to host memory.
        describe: returns in a few words how a role is divided over ranks and where it waits.
        decide: returns the settings of a role that learns, with a value for every `auto`. The
            role's model must be decided before.
        measuring: returns settings of a frozen copy of a role that learns, divided the same way.
        doctor: yields findings about the installed packages and tools.
        compiled: the parts that are compiled at their first use.
    """

    settings: Callable[[RunSpec[Any]], Iterator[Problem]] = find_nothing
    plan: Callable[[RunSpec[Any], Device], Iterator[Problem]] = find_nothing
    tools: Callable[[RunSpec[Any]], Iterator[ToolNeed]] = find_nothing
    host: Callable[[RunSpec[Any], LocalHost], Iterator[Problem]] = find_nothing
    packages: tuple[Package, ...] = ()
    offloaded: Callable[[TrainedRole | FrozenRole], tuple[str, ...]] = lambda role: ()
    describe: Callable[[TrainedRole | FrozenRole], str]
    decide: Callable[[TrainedRole], Settings]
    measuring: Callable[[TrainedRole], Settings]
    doctor: Callable[[Installed], Iterator[Problem]] = find_nothing
    compiled: tuple[Compiled, ...] = ()


@dataclass(frozen=True)
class RolloutRules:
    """The rules of an engine that samples.

    Attributes:
        title: the engine's name for people.
        where: the values of cluster.where with which it can sample.
        package: the module that it imports.
        packages: the distributions of that module and of its dependencies, with their versions;
            empty if Plimsoll itself needs the module.
        settings: yields problems between settings.
        model: yields problems of the heads and layers of a model on the disk. Args: run, the key of
            the model, its path.
        files: yields problems of other files that the settings name.
        tools: yields the system tools that the engine compiles with.
        host: yields problems of the local machine.
        start: yields problems that depend on the device of the run.
        adapter_room: returns the adapter rank for which engines reserve memory; None if they get
            merged weights.
        install: how to install the module.
        doctor: yields findings about the installed packages and tools.
        compiled: the parts that are compiled at their first use.
        shortages: parts of the engine's error messages that mean a lack of memory.
    """

    title: str
    where: tuple[str, ...]
    package: str
    packages: tuple[Package, ...] = ()
    settings: Callable[[RunSpec[Any]], Iterator[Problem]] = find_nothing
    model: Callable[[RunSpec[Any], str, str], Iterator[Problem]] = find_nothing
    files: Callable[[RunSpec[Any]], Iterator[Problem]] = find_nothing
    tools: Callable[[RunSpec[Any]], Iterator[ToolNeed]] = find_nothing
    host: Callable[[RunSpec[Any], LocalHost], Iterator[Problem]] = find_nothing
    start: Callable[[RunSpec[Any], Device], Iterator[Problem]] = find_nothing
    adapter_room: Callable[[RunSpec[Any]], int | None] = lambda spec: None
    install: str = INSTALL_EXTRA
    doctor: Callable[[Installed], Iterator[Problem]] = find_nothing
    compiled: tuple[Compiled, ...] = ()
    shortages: tuple[str, ...] = ()


def other_engines(rollout: RolloutConfig) -> str:
    """Return the settings of the other engines as text, such as `rollout: {vllm: {}}`."""
    others = (name for name in rollout.engine_types if name != rollout.engine_name)
    return " or ".join(f"rollout: {{{name}: {{}}}}" for name in others)


def trainer_engines() -> dict[str, TrainerRules]:
    """Return the rules of all engines that train, by the engines' names."""
    return {name_of(package): folder_value(package, "rules") for package in TRAINER_ENGINES}


def rollout_engines() -> dict[str, RolloutRules]:
    """Return the rules of all engines that sample, by the engines' names."""
    return {name_of(package): folder_value(package, "rules") for package in ROLLOUT_ENGINES}


def every_engine() -> tuple[TrainerRules | RolloutRules, ...]:
    """Return the rules of all engines; trainer engines come first."""
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
    """Yield problems of the run's sampling engine with a model; `key` is the key of its path."""
    for rules in engine_rules(spec):
        yield from rules.model(spec, key, path)


def all_rules(spec: RunSpec[Any]) -> tuple[TrainerRules | RolloutRules, ...]:
    """Return the rules of all engines of a run; trainer engines come first."""
    return (*trainers_of(spec), *engine_rules(spec))


def trainer_rules(role: TrainedRole | FrozenRole) -> TrainerRules:
    """Return the rules of the engine of a role."""
    return cast(TrainerRules, role.engine_value("rules"))


def trainers_of(spec: RunSpec[Any]) -> tuple[TrainerRules, ...]:
    """Return the rules of each trainer engine of a run, in the order of the roles."""
    roles: list[TrainedRole | FrozenRole] = [*spec.trained.values(), *spec.frozen.values()]
    return tuple({role.engine_name: trainer_rules(role) for role in roles}.values())
