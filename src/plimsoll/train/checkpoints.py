"""Write the checkpoints of a run, at once or while the ranks train on.

A checkpoint in the background has three parts. The ranks copy its tensors to host memory; training
waits for this alone. A thread of each rank writes its copies. At the end of a later step, when all
ranks have written theirs, this process writes the manifest and gives the checkpoint its name. At
most one checkpoint is open.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from plimsoll.cluster.protocol import Cluster, group_of
from plimsoll.errors import CannotWrite
from plimsoll.machine.faults import fault_point
from plimsoll.resolve.roles import RoleName
from plimsoll.resolve.run_spec import RunSpec
from plimsoll.run.directory import RunDirectory
from plimsoll.run.files import whole_directory
from plimsoll.run.mirror import Mirror
from plimsoll.run.state import (
    RunState,
    SavedFile,
    find_damage,
    measure_file,
    other_sizes,
    read_manifest,
    write_manifest,
)
from plimsoll.trainer.worker import Worker

R = TypeVar("R")
_ByRole = Mapping[RoleName, Sequence[R]]
"""A result of each rank, by role."""


@dataclass(frozen=True)
class _OpenCheckpoint:
    """A checkpoint whose files the ranks write."""

    state: RunState
    partial: Path
    """The directory that becomes the checkpoint."""
    stack: ExitStack
    """Its end gives the directory its name; after an error, it removes the directory."""


class Checkpoints:
    """The writer of a run's checkpoints.

    Args:
        spec: The run.
        directory: The run directory.
        planned_bytes: The predicted bytes of a checkpoint.
        mirror: Copies each whole checkpoint; None without a mirror.
    """

    def __init__(
        self,
        spec: RunSpec[Any],
        directory: RunDirectory,
        planned_bytes: int,
        mirror: Mirror | None,
    ) -> None:
        self._mirror = mirror
        self._run = spec.run
        self._roles = [role for role in spec.roles.values() if role.trained]
        self._directory = directory
        self._planned_bytes = planned_bytes
        self._open: _OpenCheckpoint | None = None

    def write(self, cluster: Cluster, state: RunState) -> None:
        """Write a checkpoint of the run's state and its trained roles, if it trains any.

        Then keep only the last `run.keep_checkpoints` checkpoints and that of the best evaluation.
        Raises CannotWrite, and removes nothing, if the disk has no room for it.
        """
        with whole_directory(self._prepare(cluster, state)) as partial:
            _complete(partial, state, self._each(cluster, Worker.save_checkpoint, partial))
        self._update_kept(state)

    def begin(self, cluster: Cluster, state: RunState) -> None:
        """Copy a checkpoint on the ranks, and let them write it in the background.

        Raises CannotWrite if the disk has no room for it.
        """
        path = self._prepare(cluster, state)
        with ExitStack() as stack:
            partial = stack.enter_context(whole_directory(path))
            self._each(cluster, Worker.begin_checkpoint, partial)
            self._open = _OpenCheckpoint(state, partial, stack.pop_all())

    def finish(self, cluster: Cluster, *, wait: bool = True) -> None:
        """Complete the open checkpoint, if there is one, and remove those that are too old.

        Without `wait`, do nothing while a rank still writes. Raises the error of a rank that could
        not write.
        """
        opened = self._open
        if opened is None or not (wait or self._is_written(cluster)):
            return
        self._open = None
        with opened.stack:
            files = self._each(cluster, Worker.finish_checkpoint)
            _complete(opened.partial, opened.state, files)
        self._update_kept(opened.state)

    @contextmanager
    def finishing(self, cluster: Cluster) -> Iterator[None]:
        """Finish an open checkpoint at the end of the block, also after an error.

        The block's error is raised, not an error of the checkpoint. A second Ctrl-C waits for
        nothing.
        """
        try:
            yield
        except Exception:
            with suppress(Exception):  # a rank that died writes nothing
                self.finish(cluster)
            raise
        self.finish(cluster)

    def find_damage(self, cluster: Cluster, path: Path) -> str:
        """Return what differs from a checkpoint's manifest, as `plimsoll.run.state.find_damage`.

        The ranks of each role read its files, each file once.
        """
        if damage := find_damage(path, with_roles=False):
            return damage
        files, differences = read_manifest(path), list[str]()
        for role in self._roles:
            above = f"{role.name}/"
            own = [
                replace(file, name=file.name.removeprefix(above))
                for file in files
                if file.name.startswith(above)
            ]
            directory = (path / role.name).absolute()
            for found in group_of(cluster, role).all(Worker.find_damage, directory, own):
                differences += (f"{above}{difference}" for difference in found)
        return "; ".join(differences)

    def _prepare(self, cluster: Cluster, state: RunState) -> Path:
        """Finish the checkpoint before, check the disk, and return the path of the next one."""
        self.finish(cluster)
        fault_point("checkpoint.begin", state.step)
        self._directory.require_space(self._planned_bytes)
        self._directory.sync_rows()
        return self._directory.checkpoint_path(state.step)

    def _each(
        self, cluster: Cluster, task: Callable[..., R], partial: Path | None = None
    ) -> _ByRole[R]:
        """Call a method of `Worker` for each role, with the directory of the role if given."""
        results = {}
        for role in self._roles:
            paths = () if partial is None else ((partial / role.name).absolute(),)
            results[role.name] = group_of(cluster, role).all(task, role.name, *paths)
        return results

    def _is_written(self, cluster: Cluster) -> bool:
        return all(map(all, self._each(cluster, Worker.is_checkpoint_written).values()))

    def _update_kept(self, state: RunState) -> None:
        """Remove checkpoints that are too old, and have the mirror do the same."""
        fault_point("checkpoint.done", state.step, path=self._directory.checkpoint_path(state.step))
        self._directory.prune_checkpoints(self._run.keep_checkpoints, state.best_step)
        if self._mirror is not None:
            self._mirror.wake()


def _complete(partial: Path, state: RunState, by_role: _ByRole[tuple[SavedFile, ...]]) -> None:
    """Write the run's state, and the manifest of all files.

    Raises CannotWrite if this process does not see what ranks wrote.
    """
    state.save(partial / "state.json")
    files = [measure_file(partial, "state.json")]
    for role, by_rank in by_role.items():
        for rank_files in by_rank:
            files += (replace(file, name=f"{role}/{file.name}") for file in rank_files)
    if missing := "; ".join(other_sizes(partial, files)):
        raise CannotWrite(
            f"The checkpoint of step {state.step} is not whole: {missing}. Ranks wrote these "
            f"files, and the process of the loop does not see them. Nothing of it was kept. "
            f"Choose a run.directory on a disk that all nodes see under the same path."
        )
    write_manifest(partial, files)
    fault_point("checkpoint.rename", state.step, path=partial)
