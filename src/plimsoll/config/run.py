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
    """What evaluations are compared by: a name in metrics.jsonl that begins with `eval/`."""
    goal: Goal = "lowest"
    """Which value is the best."""
    min_delta: NonNegativeFloat = 0.0
    """An evaluation is better if it is so by more than this."""
    patience: PositiveInt | None = None
    """Early stopping: end the run after this many evaluations in a row that are not better;
    default: never."""
    final_model: Literal["best", "last"] = "best"
    """The final model: of the best evaluation's checkpoint, or of the last step."""


class RunConfig(Settings):
    """The run directory, and the length, saving and displays of the run."""

    directory: WrittenPath
    """Where everything of the run is written."""
    seed: NonNegativeInt = 0
    """Seeds data order, sampling, dropout, and the first weights of new heads and adapters."""
    resume: Literal["never", "auto", "must"] = "never"
    """never: refuse a directory that holds a run; auto: continue one that is there;
    must: refuse to start anew."""
    edited_rows: Literal["stop", "accept"] = "stop"
    """Where a run goes on and finds rows of its data that are not what they were: stop, or accept
    them as they are now."""
    steps: PositiveInt | None = None
    """Steps of the run: optimizer steps, or in PPO rollout-and-train rounds. Give this, or
    `epochs`."""
    epochs: PositiveFloat | None = None
    """How often the run goes over its rows, of several sources over as many as all have: in steps,
    rounded up, which are known once the rows are read."""
    save_every: PositiveInt | None = None
    """Write a checkpoint every this many steps; one is always written at the end and on Ctrl-C."""
    keep_checkpoints: NonNegativeInt = 2
    """How many of the last checkpoints are kept (0: none is written). Older ones are removed. With
    0 the run cannot be resumed, whatever `save_every` says; those of an earlier part stay."""
    save_model: bool = True
    """Whether the final model is written (false: for trials)."""
    eval_every: PositiveInt | None = None
    """Evaluate on data.eval every this many steps, and at the end."""
    best: BestConfig | None = None
    """Keep the best evaluation's checkpoint, which is never removed; default: only the last ones
    are kept."""
    keep_trajectories: bool = True
    """Write every step's trajectories to Parquet (PPO)."""
    tensorboard: bool = True
    """Write TensorBoard event files into the run directory."""
    loggers: tuple[LoggerName, ...] = ()
    """Where metrics, config and sampled responses go, too: wandb, mlflow and trackio, each of which
    must be installed; tensorboard is there unless run.tensorboard is false."""
    logger_project: str = "plimsoll"
    """What loggers file the run under: W&B's and Trackio's project, MLflow's experiment."""


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
