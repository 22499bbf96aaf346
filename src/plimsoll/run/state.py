"""The files of a checkpoint besides tensors: the state that a run resumes from, and the manifest.

The manifest has sizes and checksums of the checkpoint's files, by which a damaged one is found. The
process that writes a file also takes its checksum, so that no node reads what another wrote. The
ranks that read a role's files compare them with the manifest, which is written last. Checkpoints of
earlier versions have none, and count as whole.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from math import isnan
from pathlib import Path
from typing import ClassVar

import xxhash
from pydantic import ConfigDict, TypeAdapter, ValidationError
from pydantic_core import ErrorDetails

from plimsoll import __version__
from plimsoll.config.run import BestConfig
from plimsoll.errors import ConfigError
from plimsoll.run.files import write_whole

STATE_VERSION = 3
"""Version of the file's format. A new field raises it, and has a default for older files. Files
without a version are of version 1."""


@dataclass(frozen=True)
class SourceState:
    """Fingerprints of the data that a source gave a run."""

    asked: str
    """Fingerprint of the settings that select rows and tokenize them."""
    rows: int
    """Number of usable rows."""
    content: str
    """Fingerprint of the tokenized rows, in order."""


@dataclass(frozen=True)
class RunState:
    """The state of a run after an optimizer step."""

    __pydantic_config__: ClassVar = ConfigDict(extra="forbid")
    step: int
    """Last completed step; 0 before the first."""
    data_position: int
    """Number of rows drawn from the data so far, in all epochs, without the `unlearned` ones."""
    data_rows: int
    """Number of usable rows of the data. The order of rows depends on it."""
    weight_version: int
    """Version of the weights that the step produced."""
    kl_coefficient: float
    """Weight of the KL in the next step; 0 if there is none."""
    seconds: float
    """Seconds of the run so far, including those before it was resumed."""
    best: float | None = None
    """Value of the best evaluation; None before the first."""
    best_step: int = 0
    evaluations_since_best: int = 0
    """Evaluations in a row that were not better."""
    sources: Mapping[str, SourceState] | None = None
    """Sources of data by their keys in the config; None in files of older versions."""
    rewards: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    """Running statistics of normalised rewards, by name."""
    unlearned: tuple[int, ...] = ()
    """Places, in the order of the data, of prompts that engines were sampling while the step was
    made. A resumed run samples them first. The next new prompt follows after all of these."""
    versions: Mapping[str, str] = field(default_factory=dict)
    """Versions of the libraries that made the tokens, by name; empty in files of older versions."""

    @property
    def next_place(self) -> int:
        """Place of the next row that was never drawn."""
        return self.data_position + len(self.unlearned)

    def save(self, path: Path) -> None:
        """Write the state as a JSON object."""
        fields = {"version": STATE_VERSION, **asdict(self)}
        write_whole(path, json.dumps(fields, indent=2) + "\n")

    @classmethod
    def load(cls, path: Path) -> RunState:
        """Return the state that `save` of this version or an older one wrote.

        Raises ConfigError if a field is wrong, or a newer version wrote the file.
        """
        try:
            content = path.read_bytes()
            version = TypeAdapter(_Format).validate_json(content, strict=True).version
            if version > STATE_VERSION:
                raise _newer(path, version)
            fields = json.loads(content)
            fields.pop("version", None)
            return TypeAdapter(cls).validate_json(json.dumps(fields), strict=True)
        except OSError as error:
            raise _broken(path, f"it cannot be read ({error.strerror})") from error
        except ValidationError as error:
            raise _broken(path, "; ".join(map(_describe, error.errors()))) from error


@dataclass(frozen=True)
class _Format:
    """The field of the file that says how to read the others."""

    version: int = 1


def after_evaluation(config: BestConfig, state: RunState, metrics: Mapping[str, float]) -> RunState:
    """Return the state after an evaluation, with a new best value if the metric is better.

    NaN is never better. Raises ConfigError if the evaluation gave no such metric.
    """
    if config.metric not in metrics:
        names = ", ".join(sorted(name for name in metrics if name.startswith("eval/")))
        raise ConfigError(
            f"run.best.metric {config.metric!r} is none of what the evaluation gave: {names}. "
            "Write one of these."
        )
    value = metrics[config.metric]
    if _is_better(config, value, state.best):
        return replace(state, best=value, best_step=state.step, evaluations_since_best=0)
    return replace(state, evaluations_since_best=state.evaluations_since_best + 1)


def _is_better(config: BestConfig, value: float, best: float | None) -> bool:
    if best is None:
        return not isnan(value)
    gain = best - value if config.goal == "lowest" else value - best
    return gain > config.min_delta


def is_patience_out(config: BestConfig | None, state: RunState) -> bool:
    """Return whether the run must end early: `patience` evaluations in a row were not better."""
    if config is None or config.patience is None:
        return False
    return state.evaluations_since_best >= config.patience


def _describe(error: ErrorDetails) -> str:
    """Return a text with an error's field, its value (unless missing) and its message."""
    name = ".".join(map(str, error["loc"])) or "the file"
    value = "" if error["type"] == "missing" else f" is {error['input']!r}"
    return f"{name}{value}: {error['msg']}"


def _newer(path: Path, version: int) -> ConfigError:
    return ConfigError(
        f"{path} has version {version}, and this Plimsoll ({__version__}) reads versions up to "
        f"{STATE_VERSION}: a newer Plimsoll wrote it. Resume with that one (run.log begins each "
        f"part of a run with its version), or with a newer one."
    )


def _broken(path: Path, why: str) -> ConfigError:
    return ConfigError(
        f"{path} is no run state of this version: {why}. "
        f"Resume from another checkpoint (remove this one), or start a new run.directory."
    )


MANIFEST = "manifest.json"
_PIECE = 4 * 2**20
"""Bytes that are read at once."""
_READERS = 8
"""Files that are read at once: one stream does not fill a fast disk or a network."""


@dataclass(frozen=True)
class SavedFile:
    """A file of a checkpoint as it was written."""

    name: str
    """Its path below the checkpoint."""
    bytes: int
    xxh3: str
    """The xxh3 hash (64 bits, hexadecimal) of its content."""


def measure_file(directory: Path, name: str) -> SavedFile:
    """Return the size and the checksum of a file of a checkpoint; raise OSError if unreadable."""
    digest, size = xxhash.xxh3_64(), 0
    with (directory / name).open("rb", buffering=0) as file:
        while piece := file.read(_PIECE):
            digest.update(piece)
            size += len(piece)
    return SavedFile(name, size, digest.hexdigest())


def manifest_text(files: Iterable[SavedFile]) -> str:
    """Return the text of the manifest of these files."""
    ordered = sorted(files, key=lambda file: file.name)
    content = {file.name: {"bytes": file.bytes, "xxh3": file.xxh3} for file in ordered}
    return json.dumps(content, indent=1) + "\n"


def parse_manifest(text: bytes) -> tuple[SavedFile, ...]:
    """Return the files that a manifest lists; raise ValueError if it is none."""
    try:
        content = json.loads(text)
        files = [SavedFile(name, file["bytes"], file["xxh3"]) for name, file in content.items()]
    except (TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"it lists no files ({error!r})") from error
    for file in files:
        if file.name.startswith("/") or ".." in file.name.split("/"):
            raise ValueError(f"{file.name} is outside of the checkpoint")
    return tuple(files)


def write_manifest(directory: Path, files: Iterable[SavedFile]) -> None:
    """Write the manifest of a checkpoint's files."""
    write_whole(directory / MANIFEST, manifest_text(files))


def read_manifest(directory: Path) -> tuple[SavedFile, ...]:
    """Return the files that a checkpoint's manifest lists; none if it has no manifest.

    Raises ValueError or OSError if the manifest cannot be read.
    """
    path = directory / MANIFEST
    return parse_manifest(path.read_bytes()) if path.exists() else ()


def find_damage(directory: Path, *, with_roles: bool = True) -> str:
    """Return what differs from a checkpoint's manifest: each file, expected and found; "" if whole.

    Sizes of all files are compared first. If they are right, the files are read: all of them, or
    without `with_roles` those that are no role's.
    """
    try:
        files = read_manifest(directory)
    except (OSError, ValueError) as error:
        return f"{MANIFEST} cannot be read: {error}"
    differences = [*other_sizes(directory, files)]
    if not differences:
        own = [file for file in files if with_roles or "/" not in file.name]
        try:
            differences = other_contents(directory, own)
        except OSError as error:
            differences = [f"it cannot be read: {error}"]
    return "; ".join(differences)


def other_contents(directory: Path, files: Iterable[SavedFile]) -> list[str]:
    """Return a text for each file that has another checksum. Raises OSError if one is not read."""
    with ThreadPoolExecutor(_READERS) as readers:
        found = readers.map(lambda file: _other_content(directory, file), files)
        return [difference for difference in found if difference]


def other_sizes(directory: Path, files: Iterable[SavedFile]) -> Iterator[str]:
    """Yield a text for each file that is missing or has another size, with both sizes."""
    for file in files:
        path = directory / file.name
        if not path.is_file():
            yield f"{file.name} is missing ({file.bytes:,} bytes expected)"
        elif (size := path.stat().st_size) != file.bytes:
            yield f"{file.name} has {size:,} bytes ({file.bytes:,} expected)"


def _other_content(directory: Path, file: SavedFile) -> str:
    found = measure_file(directory, file.name)
    if found == file:
        return ""
    return f"{file.name} has the xxh3 checksum {found.xxh3} ({file.xxh3} expected)"
