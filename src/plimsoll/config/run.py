"""The run: its directory, length, saving and displays; and how much a step sees.

What the config of every job has stands here, too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal, get_args

from pydantic import Field, model_validator

from plimsoll.config.base import (
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Probability,
    Secret,
    Settings,
    WrittenPath,
)
from plimsoll.config.cluster import ClusterConfig


class SftBatch(Settings):
    """A step of SFT."""

    sequences: PositiveInt = 32
    """Sequences per optimizer step, over all ranks."""
    micro_batch_tokens: PositiveInt = 4096
    """The token budget of one forward on one rank; no pack exceeds it."""


class PreferenceBatch(Settings):
    """A step of learning from pairs."""

    pairs: PositiveInt = 32
    """Pairs (chosen and rejected) per optimizer step, over all ranks."""
    micro_batch_tokens: PositiveInt = 4096
    """The token budget of one forward on one rank; no pack exceeds it."""
    share_prompts: bool = True
    """Compute a pair's prompt once: both responses attend to the same copy of it."""


class KtoBatch(Settings):
    """A step of learning from labelled responses."""

    sequences: Annotated[int, Field(ge=2)] = 32
    """Responses per optimizer step, over all ranks. The KL is measured on their prompts with other
    responses of the same step, so at least two are needed."""
    micro_batch_tokens: PositiveInt = 4096
    """The token budget of one forward on one rank; no pack exceeds it."""


class DynamicSampling(Settings):
    """Groups that teach nothing are replaced by others.

    These are groups whose rewards are all equal, and those whose mean reward does not lie strictly
    between two bounds (Yu et al. 2025, DAPO, https://arxiv.org/abs/2503.14476, section 3.2).
    """

    by: str | None = None
    """The name of the part of the reward that decides, such as one that says whether an answer is
    right; default: the weighted sum of all parts."""
    low: float | None = None
    """The lower bound of a group's mean reward; default: none."""
    high: float | None = None
    """The upper bound; default: none."""
    oversampling: Annotated[float, Field(ge=1)] = 1.0
    """Prompts that are sampled at once, as a multiple of the prompts that are still needed."""
    max_drawn: Annotated[float, Field(ge=1)] = 4.0
    """The most prompts that a step draws in all, as a multiple of batch.prompts; after them, groups
    that teach nothing fill the batch."""


class RlBatch(Settings):
    """A step of reinforcement learning."""

    prompts: PositiveInt = 32
    """Prompts per step, over all ranks."""
    responses: PositiveInt = 1
    """Responses sampled for each prompt."""
    micro_batch_tokens: PositiveInt = 4096
    """The token budget of one forward on one rank; no pack exceeds it."""
    share_prompts: bool = False
    """Compute a prompt once for those of its responses that are in the same micro-batch."""
    dynamic_sampling: DynamicSampling | None = None
    """Replace groups that teach nothing; default: they stay."""
    max_failed_groups: Probability = 0.1
    """The largest share of a step's groups whose reward may fail; such groups are replaced. At the
    first group beyond it (and beyond one group) the run stops."""


Goal = Literal["lowest", "highest"]
"""Which value of a metric is the best."""


LoggerName = Literal["tensorboard", "wandb", "mlflow", "trackio"]
"""A package that keeps metrics."""
LOGGERS: tuple[LoggerName, ...] = get_args(LoggerName)


class BestConfig(Settings):
    """Which evaluation is the best, what is done with its checkpoint, and when to stop early."""

    metric: str = "eval/loss"
    """The metric by which evaluations are compared: a name in metrics.jsonl that begins with
    `eval/`."""
    goal: Goal = "lowest"
    """Which value is the best."""
    min_delta: NonNegativeFloat = 0.0
    """An evaluation is better only if it is better by more than this."""
    patience: PositiveInt | None = None
    """Early stopping: end the run after this many evaluations in a row without a better one;
    default: never."""
    final_model: Literal["best", "last"] = "best"
    """The checkpoint of the final model: the best evaluation's, or the last step's."""


class KeptTrajectories(Settings):
    """The steps whose trajectories are kept; `true` stands for all of them, `false` for none."""

    last: NonNegativeInt | None = None
    """Keep those of this many last steps, and those that a resume may learn from again; default: of
    all steps."""
    every: PositiveInt | None = None
    """Keep those of every this many steps, too, however old they are; default: of none."""

    @model_validator(mode="before")
    @classmethod
    def _accept_all_or_none(cls, value: object) -> object:
        return {"last": None if value else 0} if isinstance(value, bool) else value

    @property
    def are_written(self) -> bool:
        """Whether a step's trajectories are written at all."""
        return self.last != 0 or self.every is not None


class RunConfig(Settings):
    """The run directory, and the length, saving and displays of the run."""

    directory: WrittenPath
    """The directory to which everything of the run is written."""
    seed: NonNegativeInt = 0
    """Seeds data order, sampling, dropout, and the first weights of new heads and adapters."""
    resume: Literal["never", "auto", "must"] = "never"
    """never: refuse a directory that holds a run; auto: continue the run if there is one; must:
    refuse to start anew."""
    edited_rows: Literal["stop", "accept"] = "stop"
    """What a resumed run does if rows of its data have changed: stop, or accept them as they are
    now."""
    steps: PositiveInt | None = None
    """Steps of the run: optimizer steps, or in PPO rollout-and-train rounds. Give this, or
    `epochs`."""
    epochs: PositiveFloat | None = None
    """How often the run uses all its rows; with several sources, it uses as many rows as they have
    together. The number of steps is rounded up, and is known once the rows are read."""
    save_every: PositiveInt | None = None
    """Write a checkpoint every this many steps; there is always one at the end and on Ctrl-C."""
    keep_checkpoints: NonNegativeInt = 2
    """How many of the last checkpoints are kept (0: none is written). Older checkpoints are
    removed. With 0 the run cannot be resumed, whatever `save_every` says; checkpoints of an earlier
    part of the run stay."""
    save_in_background: bool = False
    """Whether ranks train on while a checkpoint is written: they copy it to host memory, and a
    thread writes the copy. The checkpoint of the last step, and of Ctrl-C, is written at once."""
    save_model: bool = True
    """Whether the final model is written; false is for trials."""
    mirror: str | None = None
    """A place to which whole checkpoints, metrics and the final model are copied in the background,
    and from which a resumed run fetches a checkpoint that is newer than those in its directory: a
    URL of fsspec such as s3://bucket/runs/rl or gs://bucket/runs/rl; default: none."""
    eval_every: PositiveInt | None = None
    """Evaluate on data.eval every this many steps, and at the end."""
    best: BestConfig | None = None
    """Keep the best evaluation's checkpoint, which is never removed; default: only the last
    checkpoints are kept."""
    restarts: NonNegativeInt = 3
    """How often in an hour the run is started again from its last checkpoint after a fault of the
    machine (a process that was killed or hangs, a node that is gone), and as often after an
    unexpected error; how often a dead engine is started again. With 0 the run ends."""
    max_bad_steps: NonNegativeInt = 3
    """The most steps in a row that are left out because a reward, log-prob, value, advantage or
    gradient is not finite; one more ends the run."""
    keep_trajectories: KeptTrajectories = KeptTrajectories()
    """Write the trajectories of every step of reinforcement learning to Parquet, and keep those of
    all steps (also as `true`), of some, or of none (`false`). Without them a run that goes on from
    a checkpoint samples the steps after it again."""
    tensorboard: bool = True
    """Write TensorBoard event files into the run directory."""
    loggers: tuple[LoggerName, ...] = ()
    """Further places for metrics, config and sampled responses: wandb, mlflow and trackio, each of
    which must be installed. tensorboard is on unless run.tensorboard is false."""
    logger_project: str = "plimsoll"
    """The project of W&B and Trackio, and the experiment of MLflow, under which loggers file the
    run."""
    notify: Secret | None = None
    """The URL of a webhook, or the name of an environment variable that holds it. It gets JSON,
    `{"text": ...}`, as Slack's incoming webhooks take it: when the run begins or goes on, when a
    figure becomes unhealthy, and at the end. Default: none."""

    @property
    def copies_states(self) -> bool:
        """Whether a checkpoint before the last one may be written in the background."""
        before_last = self.save_every is not None or self.best is not None
        return self.save_in_background and self.keep_checkpoints > 0 and before_last


if TYPE_CHECKING:
    from plimsoll.config.data import DataConfig
    from plimsoll.config.engine import TrainedRole


class JobConfig(Settings):
    """The base of all jobs' configs.

    Each job's config also has the sections `data` and `actor`, and describes them.
    """

    run: RunConfig
    """The run directory, the length of the run, saving and evaluation."""
    cluster: ClusterConfig = ClusterConfig()
    """Where the ranks live."""
    if TYPE_CHECKING:
        data: DataConfig
        actor: TrainedRole
