"""What the config of every job has."""

from __future__ import annotations

from typing import TYPE_CHECKING

from plimsoll.config.base import Settings
from plimsoll.config.cluster import ClusterConfig
from plimsoll.config.run import RunConfig

if TYPE_CHECKING:
    from plimsoll.config.data import DataConfig
    from plimsoll.config.engine import TrainedRole


class JobConfig(Settings):
    """The base of all jobs' configs. Each has the sections `data` and `actor` too, and says what
    they are there."""

    run: RunConfig
    """The run directory, the length of the run, saving and evaluation."""
    cluster: ClusterConfig = ClusterConfig()
    """Where the ranks live."""
    if TYPE_CHECKING:
        data: DataConfig
        actor: TrainedRole
