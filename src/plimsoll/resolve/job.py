"""The type of a job: all that commands, the help, the rules and the planner need to know of it.

The size of a step and of its packs has one form for every job. Each file of jobs/ defines one job.
No other code refers to a job by its name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, Literal, Protocol, TypeVar, cast

from plimsoll.config.base import Choice
from plimsoll.config.data import DataConfig, SourceConfig
from plimsoll.config.load import Preset
from plimsoll.config.problems import Problem
from plimsoll.config.rollout import EnvironmentConfig, RolloutConfig, SamplingConfig
from plimsoll.config.run import Goal, JobConfig, KtoBatch, PreferenceBatch, SftBatch
from plimsoll.resolve.eval_sets import TRAINING_SAMPLING, EvalSet
from plimsoll.resolve.roles import Role

Unit = Literal["sequence", "pair", "response"]
"""The unit in which a step is counted. Both sequences of a pair are in the same micro-batch."""


@dataclass(frozen=True)
class Workload:
    """The size of the steps of a run; lengths in tokens.

    Attributes:
        unit: the unit in which a step is counted.
        units: the units of an optimizer step, all ranks together.
        count_key: the config's keys that set `units`, as text for people.
        longest: the length of the longest sequence that is learned from.
        budget: the most tokens of a pack.
        length_keys: the config's keys that set `longest`, as text for people.
        mini_batches: the optimizer steps in one pass over the data of a step of the run.
        epochs: the passes over the data of a step of the run.
        ends_only: whether the loss reads only the last token of each sequence.
        shares_prompts: whether sequences with the same prompt compute the prompt only once.
        scored_with: the sequences that the reference scores for each sequence that is learned from.
    """

    unit: Unit
    units: int
    count_key: str
    longest: int
    budget: int
    length_keys: str = "data.max_tokens"
    mini_batches: int = 1
    epochs: int = 1
    ends_only: bool = False
    shares_prompts: bool = False
    scored_with: int = 1

    @property
    def together(self) -> int:
        """The number of sequences that must be in the same micro-batch: 2 for a pair, else 1."""
        return 2 if self.unit == "pair" else 1

    @property
    def least_budget(self) -> int:
        """The smallest budget of a micro-batch: it holds the longest sequence (or pair)."""
        return self.together * self.longest

    @property
    def sequences(self) -> int:
        """The sequences of one optimizer step, all ranks together."""
        return self.together * self.units

    @property
    def updates(self) -> int:
        """The optimizer steps in one step of the run."""
        return self.epochs * self.mini_batches

    def largest_pack(self, streams: int) -> int:
        """Return the tokens of the largest pack of a stream.

        That is the token budget, or all tokens of the stream in an optimizer step if these are
        fewer. Packs that are only scored are no larger, so they need no more memory.
        """
        most = -(-self.units // streams) * self.together * self.longest
        return min(self.budget, most)


def sequences_of(batch: SftBatch | KtoBatch, data: DataConfig) -> Workload:
    """Return the workload of a job that learns from single sequences."""
    return Workload(
        "sequence", batch.sequences, "batch.sequences", data.max_tokens, batch.micro_batch_tokens
    )


def pairs_of(batch: PreferenceBatch, data: DataConfig, *, ends_only: bool = False) -> Workload:
    """Return the workload of a job that learns from pairs."""
    return Workload(
        "pair",
        batch.pairs,
        "batch.pairs",
        data.max_tokens,
        batch.micro_batch_tokens,
        ends_only=ends_only,
        shares_prompts=batch.share_prompts,
    )


@dataclass(frozen=True)
class Panel:
    """A chart of curves with one pair of axes.

    Attributes:
        title: the text above the axes.
        unit: the label of the vertical axis; all series share it.
        series: the metrics to draw, each with its name in the legend.
        stacked: whether to draw stacked areas instead of lines.
        from_zero: whether the vertical axis begins at zero. Amounts need that, as a cut axis
            exaggerates their changes.
    """

    title: str
    unit: str
    series: Mapping[str, str]
    stacked: bool = False
    from_zero: bool = False


def both(title: str, unit: str, name: str) -> Panel:
    """Return a panel with two series of a metric: in training, and on held-out rows."""
    return Panel(title, unit, {name: "training", f"eval/{name}": "held out"})


def alone(title: str, unit: str, name: str) -> Panel:
    """Return a panel with one metric."""
    return Panel(title, unit, {name: name})


def implicit_rewards(better: str, worse: str) -> Panel:
    """Return a panel with the implicit rewards of the better and of the worse responses."""
    names = {f"rewards/{name}": name for name in (better, worse)}
    return Panel("Implicit rewards in training", "per response", names)


if TYPE_CHECKING:
    from plimsoll.resolve.run_spec import RunSpec
    from plimsoll.run.readings import Planned


ConfigT = TypeVar("ConfigT", bound=JobConfig)

Names = Mapping[str, Goal | None]
"""Metrics, each with its best value (highest or lowest); None if that depends on the user."""

SOURCE = "<source>"
"""The placeholder in a metric's name for the name of a row's source."""

Measured = dict[str, float]


@dataclass(frozen=True)
class Evaluation:
    """The metrics that the evaluation of a job reports.

    With them, `run.best.metric` can be checked before anything is loaded.

    Attributes:
        metrics: the metrics; `<source>` in a name stands for the name of a row's source.
        more: whether a function of the user may report further metrics.
    """

    metrics: Names
    more: bool = False

    @property
    def written_names(self) -> Names:
        """The metrics by the names under which a run writes them, such as `eval/loss`."""
        return {f"eval/{name}": goal for name, goal in self.metrics.items()}

    def reports(self, metric: str) -> str | None:
        """Return the name in `written_names` that a metric matches, or None."""
        if metric in self.written_names:
            return metric
        return next((name for name in self.written_names if source_in(name, metric)), None)


def source_in(name: str, metric: str) -> str | None:
    """Return the source's name in a metric that matches `name`, or None if it does not match.

    `name` has the placeholder `<source>`: `a/<source>` and `a/web` give `web`.
    """
    before, placeholder, after = name.partition(SOURCE)
    if not (placeholder and metric.startswith(before) and metric.endswith(after)):
        return None
    return metric[len(before) : len(metric) - len(after)] or None


@dataclass(frozen=True)
class Sampling:
    """The work of the engines of a job that samples.

    Attributes:
        rollout: the settings of the engines.
        prompts: the number of prompts in a step.
        responses: the number of responses to each prompt.
        rewards: the functions that score responses, by the names of the reward's parts.
        sets: the sets of held-out prompts.
        environments: the environments of episodes, by name; empty for plain responses.
    """

    rollout: RolloutConfig
    prompts: int
    responses: int
    rewards: Mapping[str, Choice] = field(default_factory=dict)
    sets: tuple[EvalSet, ...] = ()
    environments: Mapping[str, EnvironmentConfig] = field(default_factory=dict)

    @property
    def longest_responses(self) -> Mapping[str, int]:
        """The most tokens after a prompt, by the config's keys that set these limits.

        With environments, these are the limits of episodes. Otherwise, they are the limits of
        responses: first in training, then to held-out prompts.
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
        """The key in `longest_responses` for training, or for the longest episodes."""
        responses = self.longest_responses
        return max(responses, key=lambda key: responses[key] if self.environments else 0)

    @property
    def sequences(self) -> int:
        """The number of sequences that a step samples."""
        return self.prompts * self.responses

    @property
    def held_out(self) -> Mapping[str, SamplingConfig]:
        """The sampling settings of held-out prompts that are not those of training, by key."""
        samplings = {eval_set.sampling_key: eval_set.sampling for eval_set in self.sets}
        return {key: sampling for key, sampling in samplings.items() if key != TRAINING_SAMPLING}


class Loop(Protocol):
    """The module that runs a job. It imports torch, so it is imported when a run starts."""

    def run(self, spec: RunSpec[Any], planned: Planned) -> None:
        """Train; resume if `run.resume` says so."""
        ...

    def measure(self, spec: RunSpec[Any], directory: Path) -> Measured:
        """Return the metrics of a model on held-out rows, without training.

        Pictures and files beside the numbers are written to `directory`.
        """
        ...


@dataclass(frozen=True)
class Job(Generic[ConfigT]):
    """A job: a command that trains.

    Attributes:
        name: the name of the command.
        summary: its line in the help.
        config: the type of its config.
        roles: returns the roles of a config.
        workload: returns the size of a step.
        columns: yields problems of a source's columns, given the source's dotted key.
        evaluation: returns the metrics that are measured on held-out rows.
        loop: the import path of its `Loop`, which needs torch.
        panels: the panels of its curves.
        choices: returns the functions that the config names, by file of algorithm/.
        rules: yields problems between settings that only this job has.
        sampling: returns the work of its engines; None if the job learns from data.
        rows: returns the settings, besides those of `data`, that change how a row is encoded.
        has_steps: whether its rows have steps, with a separator.
        streams: whether it can learn from rows of which it sees only some at a time.
        start: the settings of a first config besides data and model, by dotted key; MODEL stands
            for the model's path.
        presets: the presets that its config may name.
        preset: the preset that the command stands for (`plimsoll grpo`), or None.
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
    streams: bool = False
    start: Mapping[str, object] = field(default_factory=dict)
    presets: Mapping[str, Preset] = field(default_factory=dict)
    preset: str | None = None

    def load_loop(self) -> Loop:
        """Import and return the module that runs the job."""
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
"""The metrics of evaluations on pairs, for every job that learns from pairs."""
