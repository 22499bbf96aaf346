"""The run: its directory, length, saving and displays; and what the config of every job has."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, get_args

from plimsoll.config.base import (
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Settings,
    WrittenPath,
)
from plimsoll.config.cluster import ClusterConfig

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
    """The checkpoint of the final model: the best evaluation's, or that of the last step."""


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
    """How often the run goes over its rows; with several sources, over as many rows as all of them
    have. The number of steps is rounded up, and is known once the rows are read."""
    save_every: PositiveInt | None = None
    """Write a checkpoint every this many steps; there is always one at the end and on Ctrl-C."""
    keep_checkpoints: NonNegativeInt = 2
    """How many of the last checkpoints are kept (0: none is written). Older checkpoints are
    removed. With 0 the run cannot be resumed, whatever `save_every` says; checkpoints of an earlier
    part stay."""
    save_model: bool = True
    """Whether the final model is written; false is for trials."""
    eval_every: PositiveInt | None = None
    """Evaluate on data.eval every this many steps, and at the end."""
    best: BestConfig | None = None
    """Keep the best evaluation's checkpoint, which is never removed; default: only the last
    checkpoints are kept."""
    keep_trajectories: bool = True
    """Write every step's trajectories to Parquet (PPO)."""
    tensorboard: bool = True
    """Write TensorBoard event files into the run directory."""
    loggers: tuple[LoggerName, ...] = ()
    """Further places for metrics, config and sampled responses: wandb, mlflow and trackio, each of
    which must be installed. tensorboard is on unless run.tensorboard is false."""
    logger_project: str = "plimsoll"
    """The project of W&B and Trackio, and the experiment of MLflow, under which loggers file the
    run."""


if TYPE_CHECKING:
    from plimsoll.config.data import DataConfig
    from plimsoll.config.engine import TrainedRole


class JobConfig(Settings):
    """The base of all jobs' configs.

    Each has the sections `data` and `actor` too, and says what they are there.
    """

    run: RunConfig
    """The run directory, the length of the run, saving and evaluation."""
    cluster: ClusterConfig = ClusterConfig()
    """Where the ranks live."""
    if TYPE_CHECKING:
        data: DataConfig
        actor: TrainedRole
