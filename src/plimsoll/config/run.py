"""The run: its directory, length, saving, and what is shown."""

from __future__ import annotations

from typing import Literal

from plimsoll.config.base import NonNegativeInt, PositiveInt, Settings


class RunConfig(Settings):
    """The run directory and its habits."""

    directory: str
    """Where everything of the run is written."""
    seed: NonNegativeInt = 0
    """Seeds data order, sampling and initialisation of new heads."""
    resume: Literal["never", "auto", "must"] = "never"
    """never: refuse a directory that holds a run; auto: continue one that is there;
    must: refuse to start anew."""
    steps: PositiveInt
    """Steps of the run: optimizer steps (SFT, pairs), or rollout-and-train rounds (RL)."""
    save_every: PositiveInt | None = None
    """Write a checkpoint every so many steps; one is always written at the end and on Ctrl-C."""
    keep_checkpoints: PositiveInt = 2
    """Older checkpoints are removed."""
    eval_every: PositiveInt | None = None
    """Evaluate on data.eval every so many steps, and at the end."""
    keep_trajectories: bool = True
    """Write every step's trajectories to Parquet (RL)."""
    tensorboard: bool = True
    """Write TensorBoard event files into the run directory."""
