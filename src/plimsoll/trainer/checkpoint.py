"""A trained role's checkpoint: masters, moments and moving average as stretches of named weights.

Every rank writes its stretches to its own safetensors files. On resume, every rank reads the
stretches that it then holds from the files of all ranks. So a run can go on with another number of
ranks, ZeRO stage or offload. With the same ones, the values are restored bit for bit, and every
stretch is checked against its checksum. The model's weights are the masters, rounded. 8-bit Adam
quantises its moments in blocks within a rank's share, so only a run that is divided in the same way
can read them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from plimsoll.errors import ConfigError
from plimsoll.machine.faults import fault_point
from plimsoll.run.files import explaining_errors, sync
from plimsoll.run.state import SavedFile, measure_file
from plimsoll.sync.buckets import hash_bytes
from plimsoll.trainer.price import CHECKPOINT_FILE


@dataclass(frozen=True)
class Stretch:
    """A contiguous part of one weight, and its place in a master (a tensor that a rank updates).

    Attributes:
        name: The weight's name in the module.
        start: The index of the first element in the full, flattened weight.
        master: The index of the master that holds the stretch.
        offset: The index of the first element in the master.
        size: The number of elements.
    """

    name: str
    start: int
    master: int
    offset: int
    size: int


Rows = Mapping[str, Sequence[Tensor]]
"""For each kind of state (master, exp_avg, ...), one flat tensor per master of the rank."""


@dataclass(frozen=True)
class CheckpointFile:
    """A file that a rank writes for a role.

    Attributes:
        name: The name of the file.
        content: Tensors by name, copied to host memory; or text.
    """

    name: str
    content: Mapping[str, Tensor] | str


def write_files(files: Iterable[CheckpointFile], directory: Path) -> tuple[SavedFile, ...]:
    """Write files to the directory and flush them to the disk; return their checksums.

    Each file is written before the next one is taken from `files`.
    """
    with explaining_errors(directory):
        directory.mkdir(parents=True, exist_ok=True)
    return tuple(_write(file, directory) for file in files)


def _write(file: CheckpointFile, directory: Path) -> SavedFile:
    """Write a file; the checksums of its tensors go into its metadata.

    A resume checks these, so that it does not train on tensors that were changed while the files
    were read. The file's own checksum is taken from the system's cache, without the disk.
    """
    path, content = directory / file.name, file.content
    with explaining_errors(path):
        if isinstance(content, str):
            path.write_text(content, encoding="utf-8")
        else:
            save_file({**content}, path, {name: hash_bytes(t) for name, t in content.items()})
        sync(path)
        measured = measure_file(directory, file.name)
        fault_point("checkpoint.file", path=path)
        return measured


_WRITER = re.compile(r"(?:rank|blocks)-(\d+)")


def share_of(files: Sequence[SavedFile], rank: int, ranks: int) -> list[SavedFile]:
    """Return the files of a role that a rank compares with the manifest, each on one rank.

    If as many ranks wrote them, each has its own, which it then reads. Else all have equally many.
    """
    matches = (_WRITER.match(file.name) for file in files)
    writers = [int(match[1]) if match else 0 for match in matches]
    owners = writers if len({*writers}) == ranks else range(len(files))
    return [file for file, owner in zip(files, owners, strict=True) if owner % ranks == rank]


def row_files(rows: Rows, parts: Sequence[Stretch], rank: int) -> Iterator[CheckpointFile]:
    """Yield the safetensors files of this rank's stretches; each is copied when it is taken."""
    for number, tensors in enumerate(_cut_into_files(_stretches(rows, parts))):
        yield CheckpointFile(f"rank-{rank:05d}-{number:05d}.safetensors", tensors)


def _stretches(rows: Rows, parts: Sequence[Stretch]) -> Iterator[tuple[str, Tensor]]:
    """Yield (name in the file, elements), cut so that each fits a file."""
    for kind, tensors in rows.items():
        for part in parts:
            row = tensors[part.master]
            most = CHECKPOINT_FILE // row.element_size()
            for skip in range(0, part.size, most):
                size = min(most, part.size - skip)
                name = f"{kind}/{part.start + skip}/{part.name}"
                yield name, row.narrow(0, part.offset + skip, size)


def _cut_into_files(stretches: Iterator[tuple[str, Tensor]]) -> Iterator[dict[str, Tensor]]:
    tensors: dict[str, Tensor] = {}
    room = CHECKPOINT_FILE
    for name, stretch in stretches:
        if tensors and stretch.nbytes > room:
            yield tensors
            tensors, room = {}, CHECKPOINT_FILE
        tensors[name] = stretch.to("cpu", copy=True)
        room -= stretch.nbytes
    if tensors:
        yield tensors


@dataclass(frozen=True)
class _StoredTensor:
    """A tensor in an open file.

    Attributes:
        file: The file.
        key: The tensor's name in the file.
        checksum: The hash of its bytes, or None in a file of an earlier version.
    """

    file: Any
    key: str
    checksum: str | None

    @property
    def elements(self) -> int:
        """The number of elements of a flat tensor."""
        return int(self.file.get_slice(self.key).get_shape()[0])

    def read(self, begin: int = 0, end: int | None = None) -> Tensor:
        """Return elements `begin` to `end` of a flat tensor; without `end`, the full tensor.

        Raises:
            SafetensorError: The full tensor was read, and its checksum does not match.
        """
        if end is not None and end - begin != self.elements:
            part: Tensor = self.file.get_slice(self.key)[begin:end]
            return part
        whole: Tensor = self.file.get_tensor(self.key)
        if self.checksum not in (None, hash_bytes(whole)):
            raise SafetensorError(f"{self.key} is not what was written: its checksum is another")
        return whole


def _read_file(path: Path) -> Iterator[_StoredTensor]:
    with safe_open(path, "pt") as file:
        checksums = file.metadata() or {}
        for key in file.keys():  # noqa: SIM118
            yield _StoredTensor(file, key, checksums.get(key))


def _read_stretches(directory: Path) -> Iterator[tuple[str, int, str, _StoredTensor]]:
    """Yield (kind, index of first element in the weight, weight's name, stored tensor)."""
    for path in sorted(directory.glob("rank-*-*.safetensors")):
        for tensor in _read_file(path):
            kind, start, name = tensor.key.split("/", 2)
            yield kind, int(start), name, tensor


@contextmanager
def _refuse_broken_files(directory: Path) -> Iterator[None]:
    """Turn read errors inside the block into ConfigError."""
    try:
        yield
    except (OSError, SafetensorError, ValueError, RuntimeError) as error:
        raise broken_checkpoint(directory, str(error)) from error


def read_rows(rows: Rows, parts: Sequence[Stretch], directory: Path) -> None:
    """Fill this rank's stretches in `rows` from the files of all ranks.

    Raises:
        ConfigError: A file cannot be read, or no file holds some element.
    """
    missing = len(rows) * sum(part.size for part in parts)
    by_name: dict[str, list[Stretch]] = {}
    for part in parts:
        by_name.setdefault(part.name, []).append(part)
    with _refuse_broken_files(directory):
        for kind, start, name, tensor in _read_stretches(directory):
            for part in by_name.get(name, ()) if kind in rows else ():
                missing -= _fill(rows[kind][part.master], part, start, tensor)
    if missing:
        raise broken_checkpoint(
            directory, f"{missing} of the elements that this rank holds are in no file"
        )


def _fill(row: Tensor, part: Stretch, start: int, tensor: _StoredTensor) -> int:
    """Copy the elements that the part shares with a stored stretch; return their number.

    `start`: the index of the stored stretch's first element in the full weight.
    """
    begin, end = max(part.start, start), min(part.start + part.size, start + tensor.elements)
    if begin >= end:
        return 0
    offset = part.offset + begin - part.start
    row.narrow(0, offset, end - begin).copy_(tensor.read(begin - start, end - start))
    return end - begin


def read_weights(directory: Path, kind: str) -> dict[str, Tensor]:
    """Return one kind of state, such as `master`, of all weights: flat tensors by module name.

    The stretches of all ranks are joined. If one stretch is the full weight, it is mapped from its
    file.

    Raises:
        ConfigError: A file cannot be read, a stretch is missing, or there are none of the kind.
    """
    pieces: dict[str, list[tuple[int, Tensor]]] = {}
    with _refuse_broken_files(directory):
        for tensor_kind, start, name, tensor in _read_stretches(directory):
            if tensor_kind == kind:
                pieces.setdefault(name, []).append((start, tensor.read()))
    if not pieces:
        raise broken_checkpoint(directory, f"no file holds a stretch of {kind}")
    return {
        name: _join_pieces(directory, name, weight_pieces) for name, weight_pieces in pieces.items()
    }


def _join_pieces(directory: Path, name: str, pieces: Sequence[tuple[int, Tensor]]) -> Tensor:
    ordered = sorted(pieces, key=lambda piece: piece[0])
    expected = 0
    for start, piece in ordered:
        if start != expected:
            raise broken_checkpoint(directory, f"{name} has no element {expected}")
        expected += piece.numel()
    return ordered[0][1] if len(ordered) == 1 else torch.cat([piece for _, piece in ordered])


def block_file(states: Sequence[Mapping[str, object]], rank: int) -> CheckpointFile:
    """Return the file of the 8-bit optimizer's state of each of this rank's masters, unchanged."""
    tensors = {
        f"{number}/{name}": value.to("cpu", copy=True)
        for number, state in enumerate(states)
        for name, value in state.items()
        if isinstance(value, Tensor)
    }
    return CheckpointFile(_blocks(rank), tensors)


def read_blocks(directory: Path, rank: int) -> dict[int, dict[str, Tensor]]:
    """Return the states of a rank's `block_file`: tensors by name, by master's index."""
    states: dict[int, dict[str, Tensor]] = {}
    with _refuse_broken_files(directory):
        for tensor in _read_file(directory / _blocks(rank)):
            number, name = tensor.key.split("/", 1)
            states.setdefault(int(number), {})[name] = tensor.read()
    return states


def _blocks(rank: int) -> str:
    return f"blocks-{rank:05d}.safetensors"


def broken_checkpoint(directory: Path, why: str) -> ConfigError:
    """Return the error for an incomplete or damaged checkpoint; `why`: what is wrong with it."""
    return ConfigError(
        f"{directory} holds no whole checkpoint of this role ({why}). Resume from another "
        f"checkpoint (remove this one), or start a new run.directory."
    )
