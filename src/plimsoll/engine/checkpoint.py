"""A trained role's checkpoint: masters, moments and moving average as stretches of named weights.

Every rank writes the stretches that it holds to safetensors files of its own; at a resume every
rank reads those that it then holds, whoever wrote them. So a run goes on with another number of
ranks, another ZeRO stage or another offload; on the same ones, bit for bit, and then every stretch
is held against its checksum. The model's weights are the masters', rounded. The moments of 8-bit
Adam are quantised in blocks of what a rank held, and are read back by a run that is divided in the
same way alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from plimsoll.engine.price import CHECKPOINT_FILE
from plimsoll.engine.weights import hash_bytes
from plimsoll.errors import ConfigError
from plimsoll.run.files import explaining_errors


@dataclass(frozen=True)
class Stretch:
    """A stretch of one weight, within a tensor that a rank's optimizer updates (a master).

    Attributes:
        name: The weight's name in the module.
        start: The first element, in the whole, flattened weight.
        master: The index of the master that holds the stretch.
        offset: The first element, in the master.
        size: Elements.
    """

    name: str
    start: int
    master: int
    offset: int
    size: int


Rows = Mapping[str, Sequence[Tensor]]
"""A flat tensor for each master of the rank, by kind (master, exp_avg, ...)."""


def write_rows(rows: Rows, parts: Sequence[Stretch], directory: Path, rank: int) -> None:
    """Write this rank's stretches."""
    for number, tensors in enumerate(_files(_stretches(rows, parts))):
        _write(tensors, directory / f"rank-{rank:05d}-{number:05d}.safetensors")


def _write(tensors: dict[str, Tensor], path: Path) -> None:
    """Write tensors of this host, and in the file's metadata the checksum of each.

    With the checksums, tensors that a disk or a copy changed are not trained on.
    """
    with explaining_errors(path):
        save_file(tensors, path, {name: hash_bytes(tensor) for name, tensor in tensors.items()})


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


def _files(stretches: Iterator[tuple[str, Tensor]]) -> Iterator[dict[str, Tensor]]:
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
        """The elements of a flat tensor."""
        return int(self.file.get_slice(self.key).get_shape()[0])

    def read(self, begin: int = 0, end: int | None = None) -> Tensor:
        """Return the elements of a flat tensor from `begin` to `end`, or all of any tensor.

        Raises:
            SafetensorError: A whole tensor is not what was written.
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
    """Yield (kind, first element in the whole weight, its name, stored tensor) from all files."""
    for path in sorted(directory.glob("rank-*-*.safetensors")):
        for tensor in _read_file(path):
            kind, start, name = tensor.key.split("/", 2)
            yield kind, int(start), name, tensor


@contextmanager
def _refuse_broken_files(directory: Path) -> Iterator[None]:
    """Turn read errors inside the block into ConfigError."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        raise broken_checkpoint(directory, str(error)) from error


def read_rows(rows: Rows, parts: Sequence[Stretch], directory: Path) -> None:
    """Fill this rank's stretches with what all ranks wrote.

    Raises:
        ConfigError: A file cannot be read, or an element is in none.
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
    """Copy the elements that the part shares with a stored stretch; return how many.

    `start` is the stored stretch's first element in the whole weight.
    """
    begin, end = max(part.start, start), min(part.start + part.size, start + tensor.elements)
    if begin >= end:
        return 0
    offset = part.offset + begin - part.start
    row.narrow(0, offset, end - begin).copy_(tensor.read(begin - start, end - start))
    return end - begin


def read_weights(directory: Path, kind: str) -> dict[str, Tensor]:
    """Return whole weights, flat, by their names in the module.

    They are put together from what all ranks wrote of a kind, such as `master`, and mapped from the
    files if one stretch holds all.

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


def write_blocks(states: Sequence[Mapping[str, object]], directory: Path, rank: int) -> None:
    """Write the state of an 8-bit optimizer for each master, as it is."""
    tensors = {
        f"{number}/{name}": value.to("cpu", copy=True)
        for number, state in enumerate(states)
        for name, value in state.items()
        if isinstance(value, Tensor)
    }
    _write(tensors, directory / _blocks(rank))


def read_blocks(directory: Path, rank: int) -> dict[int, dict[str, Tensor]]:
    """Return what `write_blocks` wrote, by the number of the master."""
    states: dict[int, dict[str, Tensor]] = {}
    with _refuse_broken_files(directory):
        for tensor in _read_file(directory / _blocks(rank)):
            number, name = tensor.key.split("/", 1)
            states.setdefault(int(number), {})[name] = tensor.read()
    return states


def _blocks(rank: int) -> str:
    return f"blocks-{rank:05d}.safetensors"


def broken_checkpoint(directory: Path, why: str) -> ConfigError:
    """Return the error of a checkpoint that lacks something."""
    return ConfigError(
        f"{directory} holds no whole checkpoint of this role ({why}). Resume from another "
        f"checkpoint (remove this one), or start a new run.directory."
    )
