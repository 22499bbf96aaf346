"""What a job is: everything that a command, the help, the rules and the planner need to know of it.

Each file of jobs/ makes one such value. Nothing else in the house knows a job by its name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar, cast

from plimsoll.config.base import Choice
from plimsoll.config.data import SourceConfig
from plimsoll.config.environment import EnvironmentConfig
from plimsoll.config.load import Preset
from plimsoll.config.problems import Problem
from plimsoll.config.rollout import RolloutConfig, SamplingConfig
from plimsoll.config.run import Goal, JobConfig
from plimsoll.spec.eval_sets import TRAINING_SAMPLING, EvalSet
from plimsoll.spec.roles import Role
from plimsoll.spec.workload import Workload


@dataclass(frozen=True)
class Panel:
    """One set of axes.

    Attributes:
        title: above the axes.
        unit: the label of the vertical axis, for everything that is drawn there.
        series: the metrics to draw, each with its name in the legend.
        stacked: draw areas that add up, instead of lines.
        from_zero: begin the axis at zero, for amounts: a cut axis would exaggerate their changes.
    """

    title: str
    unit: str
    series: Mapping[str, str]
    stacked: bool = False
    from_zero: bool = False


def both(title: str, unit: str, name: str) -> Panel:
    """Return a panel with a metric in training, if it has one, and on held-out rows."""
    return Panel(title, unit, {name: "training", f"eval/{name}": "held out"})


def alone(title: str, unit: str, name: str) -> Panel:
    """Return a panel with one metric."""
    return Panel(title, unit, {name: name})


def implicit_rewards(better: str, worse: str) -> Panel:
    """Return a panel with the implicit rewards of the better and of the worse responses."""
    names = {f"rewards/{name}": name for name in (better, worse)}
    return Panel("Implicit rewards in training", "per response", names)


if TYPE_CHECKING:
    from plimsoll.run.readings import Planned
    from plimsoll.spec.run_spec import RunSpec


ConfigT = TypeVar("ConfigT", bound=JobConfig)

Names = Mapping[str, Goal | None]
"""Metrics, and which value of each is the best; None if that depends on what the user wants."""

SOURCE = "<source>"
"""The placeholder in a metric's name for the source that rows name."""

Measured = dict[str, float]


@dataclass(frozen=True)
class Evaluation:
    """The metrics that the evaluation of a job reports.

    A choice by one of them can be checked before anything is loaded.

    Attributes:
        metrics: in a name `<source>` stands for what rows name as their source.
        more: whether a function of one's own may report others.
    """

    metrics: Names
    more: bool = False

    @property
    def written_names(self) -> Names:
        """The metrics by the names under which a run writes them, such as `eval/loss`."""
        return {f"eval/{name}": goal for name, goal in self.metrics.items()}

    def reports(self, metric: str) -> str | None:
        """Return which of the written names a metric has, or None."""
        if metric in self.written_names:
            return metric
        return next((name for name in self.written_names if source_in(name, metric)), None)


def source_in(name: str, metric: str) -> str | None:
    """Return what stands in a metric in the place of `<source>` in a name, or None if none does."""
    before, placeholder, after = name.partition(SOURCE)
    if not (placeholder and metric.startswith(before) and metric.endswith(after)):
        return None
    return metric[len(before) : len(metric) - len(after)] or None


@dataclass(frozen=True)
class Sampling:
    """The work of the engines of a job that samples.

    Attributes:
        rollout: the settings of the engines.
        prompts: prompts of a step.
        responses: responses to each prompt.
        rewards: the functions that score responses, by their names.
        sets: the sets of held-out prompts.
        environments: the environments that make episodes of prompts, by name.
    """

    rollout: RolloutConfig
    prompts: int
    responses: int
    rewards: Mapping[str, Choice] = field(default_factory=dict)
    sets: tuple[EvalSet, ...] = ()
    environments: Mapping[str, EnvironmentConfig] = field(default_factory=dict)

    @property
    def longest_responses(self) -> Mapping[str, int]:
        """The most tokens after a prompt, by the keys that say so.

        They are those of episodes; or of responses in training, and to held-out prompts.
        """
        if self.environments:
            return {
                f"environments.{name}.max_tokens": environment.max_tokens
                for name, environment in self.environments.items()
            }
        training = {"rollout.sampling": self.rollout.sampling, **self.held_out}
        return {f"{key}.max_new_tokens": s.max_new_tokens for key, s in training.items()}

    @property
    def longest_key(self) -> str:
        """The one of these keys that is for training, or for the longest episodes."""
        responses = self.longest_responses
        return max(responses, key=lambda key: responses[key] if self.environments else 0)

    @property
    def sequences(self) -> int:
        """Sequences that are sampled in a step."""
        return self.prompts * self.responses

    @property
    def held_out(self) -> Mapping[str, SamplingConfig]:
        """How held-out prompts are answered if not as in training, by the keys that say so."""
        samplings = {eval_set.sampling_key: eval_set.sampling for eval_set in self.sets}
        return {key: sampling for key, sampling in samplings.items() if key != TRAINING_SAMPLING}


class Loop(Protocol):
    """The module that runs a job. It imports torch, so it is imported when a run starts."""

    def run(self, spec: RunSpec[Any], planned: Planned) -> None:
        """Train; resume if `run.resume` says so."""
        ...

    def measure(self, spec: RunSpec[Any], directory: Path) -> Measured:
        """Return the measures of a model as the job's evaluation takes them, without training.

        What is drawn and written beside the numbers goes to the directory.
        """
        ...


@dataclass(frozen=True)
class Job(Generic[ConfigT]):
    """A command that trains.

    Attributes:
        name: of the command.
        summary: its line in the help.
        config: the type of its file.
        roles: its models, in the order in which they are loaded.
        workload: what a step sees.
        columns: problems of the columns of a source, with the dotted key that is given.
        evaluation: what is measured on held-out rows.
        loop: the import path of its `Loop`, which needs torch.
        panels: those of its curves.
        choices: the functions that the config names, by package of algorithm/.
        rules: what must agree in a config of this job alone.
        sampling: what its engines do; None if it learns from data.
        rows: settings besides those of `data` that decide what is made of a row.
        has_steps: whether its rows have steps, with a separator.
        start: what a first config says besides data and model, by dotted key; MODEL stands for the
            model's path.
        presets: those that its config may name.
        preset: the one that its command is.
    """

    name: str
    summary: str
    config: type[ConfigT]
    roles: Callable[[ConfigT], Sequence[Role]]
    workload: Callable[[ConfigT], Workload]
    columns: Callable[[str, SourceConfig], Iterator[Problem]]
    evaluation: Callable[[ConfigT], Evaluation]
    loop: str
    panels: Sequence[Panel]
    choices: Callable[[ConfigT], Mapping[str, Choice]] = field(default=lambda config: {})
    rules: Callable[[ConfigT], Iterator[Problem]] = field(default=lambda config: iter(()))
    sampling: Callable[[ConfigT], Sampling | None] = field(default=lambda config: None)
    rows: Callable[[ConfigT], Mapping[str, object]] = field(default=lambda config: {})
    has_steps: bool = False
    start: Mapping[str, object] = field(default_factory=dict)
    presets: Mapping[str, Preset] = field(default_factory=dict)
    preset: str | None = None

    def load_loop(self) -> Loop:
        """Return the module that runs it."""
        return cast(Loop, import_module(self.loop))


def with_interval(name: str, goal: Goal | None) -> Names:
    """Return a metric and the ends of its confidence interval."""
    return {name: goal, f"{name}_low": goal, f"{name}_high": goal}


ACCURACY = with_interval("accuracy", "highest")
"""The accuracy, which evaluations of several jobs report."""
PAIR_METRICS: Names = {
    "loss": "lowest",
    **ACCURACY,
    "rewards/margin": "highest",
    "rewards/chosen": None,
    "rewards/rejected": None,
}
"""What evaluations on pairs report, whichever job learns from them."""
