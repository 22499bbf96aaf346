"""Copy a run to another place of fsspec, such as an object store, and fetch it from there.

The mirror holds what the run directory keeps: whole checkpoints, rows, logs and the final model. A
directory is copied file by file, and its manifest last. A directory without a manifest counts as
not there, so a reader never takes half of one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Event, Thread

from plimsoll.config.run import RunConfig
from plimsoll.errors import CheckpointDamaged, ConfigError, PlimsollError
from plimsoll.run.directory import RunDirectory, is_checkpoint_name
from plimsoll.run.files import remove_directory, whole_directory, whole_file
from plimsoll.run.state import (
    MANIFEST,
    find_damage,
    manifest_text,
    measure_file,
    parse_manifest,
    read_manifest,
)

_CHECKPOINTS = "checkpoints"
_MODEL = "model"
_NEEDED = ("config.yaml", "chat_template.jinja", "metrics.jsonl", "ledger.jsonl")
"""Files that a resumed run goes on with."""
_FILES = (*_NEEDED, "plan.json", "bad_rows.jsonl", "run.log", "end.json")

_WITHOUT_WORD = 3.0
"""Seconds that the end of a run waits for the last copy without a message."""


class Mirror:
    """The mirror of a run.

    Args:
        url: The place, such as `s3://bucket/runs/rl`.
        note: Takes messages for the user.
    """

    def __init__(self, url: str, note: Callable[[str], None]) -> None:
        from fsspec.core import url_to_fs
        from fsspec.implementations.dirfs import DirFileSystem

        self._url = url.rstrip("/")
        fs, root = url_to_fs(self._url)
        self._fs = DirFileSystem(root, fs)
        self._note = note
        self._wanted = Event()
        self._is_last = False

    def fetch(self, run: RunDirectory, config: RunConfig) -> None:
        """Fetch the newest whole checkpoint if it is newer than the directory's, with the rows.

        Raises ConfigError if the mirror holds a run that `run.resume: never` would overwrite, or
        cannot be read.
        """
        try:
            self._fetch_newer(run, config)
        except PlimsollError:
            raise
        except Exception as error:  # every kind of place raises its own errors
            raise ConfigError(
                f"run.mirror {self._url} cannot be read: {error}. Correct the URL, or the account "
                f"that the environment gives; or leave run.mirror out."
            ) from error

    def _fetch_newer(self, run: RunDirectory, config: RunConfig) -> None:
        names = (f"{_CHECKPOINTS}/{name}" for name in self._list_checkpoints())
        whole = (name for name in names if self._fs.exists(f"{name}/{MANIFEST}"))
        steps = {int(name.rpartition("-")[2]): name for name in whole}
        if config.resume == "never" and steps:
            raise ConfigError(
                f"run.mirror {self._url} already holds a run (its last checkpoint is of step "
                f"{max(steps)}), and run.resume is never. run.resume: auto continues it; or choose "
                f"another run.mirror."
            )
        latest = run.latest_checkpoint()
        for step in sorted(steps, reverse=True):
            if latest is not None and step <= latest[0]:
                return
            if self._fetch_checkpoint(steps[step], run.checkpoint_path(step)):
                for name in filter(self._fs.exists, _NEEDED):
                    with whole_file(run.path / name) as partial:
                        self._fs.get_file(name, str(partial))
                return

    @contextmanager
    def following(self, run: RunDirectory) -> Iterator[None]:
        """During the block, copy the run in a thread after each `wake`; copy all at its end.

        An interrupt (a second Ctrl-C) waits for nothing. After a CheckpointDamaged nothing is
        copied: the copy of that checkpoint may be whole, and is fetched next.
        """
        thread = Thread(target=self._follow, args=(run,), name="mirror", daemon=True)
        thread.start()
        try:
            yield
        except (KeyboardInterrupt, CheckpointDamaged):
            raise
        except BaseException:
            self._end(thread)
            raise
        self._end(thread)

    def wake(self) -> None:
        """Copy what the run directory keeps now, in the thread."""
        self._wanted.set()

    def _end(self, thread: Thread) -> None:
        self._is_last = True
        self.wake()
        thread.join(_WITHOUT_WORD)
        if thread.is_alive():
            self._note(f"waiting for the last copy to {self._url}; Ctrl-C leaves it out")
            thread.join()

    def _follow(self, run: RunDirectory) -> None:
        """Copy the run each time that it is wanted.

        Consumes: `wake`. Waits for: it. Unblocked by: `wake` and the end of the block. Produces:
        the mirror's files. Shut down by the end of the block, after a last copy.
        """
        is_last = False
        while not is_last:
            self._wanted.wait()
            self._wanted.clear()
            is_last = self._is_last
            try:
                self._copy(run, with_model=is_last)
            except Exception as error:  # noqa: BLE001  every kind of place raises its own errors
                later = "Resuming the run" if is_last else "The next checkpoint"
                self._note(
                    f"warning: {self._url} was not brought up to date: {error}. What it has is "
                    f"whole. {later} tries it again."
                )

    def _copy(self, run: RunDirectory, with_model: bool) -> None:
        """Copy rows and new checkpoints, then remove checkpoints that the directory lacks."""
        for name in _FILES:
            if (run.path / name).is_file():
                self._put(run.path / name, name)
        kept = run.checkpoints()
        for path in reversed(kept.values()):
            self._put_directory(path, f"{_CHECKPOINTS}/{path.name}")
        if with_model and run.model_path.is_dir():
            self._put_directory(run.model_path, _MODEL)
        kept_names = {path.name for path in kept.values()}
        for name in self._list_checkpoints() if kept_names else ():
            if name not in kept_names:
                self._remove(f"{_CHECKPOINTS}/{name}")

    def _put_directory(self, local: Path, name: str) -> None:
        """Copy a directory unless it is there; do nothing if the run removes it meanwhile."""
        try:
            files = read_manifest(local) or [
                measure_file(local, str(path.relative_to(local)))
                for path in sorted(local.rglob("*"))
                if path.is_file()
            ]
            manifest = manifest_text(files).encode()
            there = f"{name}/{MANIFEST}"
            with suppress(FileNotFoundError):
                if self._fs.cat_file(there) == manifest:
                    return
            self._remove(name)
            for file in files:
                self._put(local / file.name, f"{name}/{file.name}")
            self._fs.pipe_file(there, manifest)
        except FileNotFoundError:
            if local.exists():
                raise

    def _put(self, local: Path, name: str) -> None:
        self._fs.makedirs(name.rpartition("/")[0], exist_ok=True)
        self._fs.put_file(str(local), name)

    def _remove(self, name: str) -> None:
        """Remove a directory, its manifest first, so that half of it does not count."""
        for path in (f"{name}/{MANIFEST}", name):
            if self._fs.exists(path):
                self._fs.rm(path, recursive=True)

    def _fetch_checkpoint(self, name: str, path: Path) -> bool:
        """Fetch a checkpoint; return whether it is whole. A damaged one is reported."""
        try:
            with whole_directory(path) as partial:
                manifest = self._fs.cat_file(f"{name}/{MANIFEST}")
                for file in parse_manifest(manifest):
                    (partial / file.name).parent.mkdir(exist_ok=True)
                    self._fs.get_file(f"{name}/{file.name}", str(partial / file.name))
                (partial / MANIFEST).write_bytes(manifest)
            damage = find_damage(path)
        except (FileNotFoundError, ValueError) as error:
            damage = str(error)
        if damage:
            remove_directory(path)
            self._note(f"{self._url}/{name} is damaged and is left out: {damage}")
            return False
        self._note(f"{path} was fetched from {self._url}")
        return True

    def _list_checkpoints(self) -> list[str]:
        """Return the names of the checkpoints, whole or not."""
        self._fs.invalidate_cache()
        try:
            paths = self._fs.ls(_CHECKPOINTS, detail=False)
        except FileNotFoundError:
            return []
        names = (path.rstrip("/").rpartition("/")[2] for path in paths)
        return [name for name in names if is_checkpoint_name(name)]
