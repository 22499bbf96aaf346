"""What the config of every job has."""

from __future__ import annotations

from typing import TYPE_CHECKING

from plimsoll.config.base import Settings

if TYPE_CHECKING:
    from plimsoll.config.cluster import ClusterConfig
    from plimsoll.config.data import DataConfig
    from plimsoll.config.engine import TrainedRole
    from plimsoll.config.run import RunConfig


class JobConfig(Settings):
    """The base of all jobs' configs. Each lists these sections itself, in its own order."""

    if TYPE_CHECKING:
        run: RunConfig
        cluster: ClusterConfig
        data: DataConfig
        actor: TrainedRole
