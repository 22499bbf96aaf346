"""A trained role's checkpoint: masters, moments and moving average as stretches of named weights.

Every rank writes the stretches that it holds to safetensors files of its own; at a resume every
rank reads those that it then holds, whoever wrote them. So a run goes on with another number of
ranks, another ZeRO stage or another offload; on the same ones, bit for bit, and then every stretch
is held against its checksum. The model's weights are the masters', rounded. The moments of 8-bit
Adam are quantised in blocks of what a rank held, and are read back by a run that is divided in the
same way alone.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from plimsoll.config.engine import TrainedRole
from plimsoll.config.problems import show
from plimsoll.engine.checksums import check, checksums, save_checked
from plimsoll.engine.masters import Part
from plimsoll.engine.price.transfers import CHECKPOINT_FILE
from plimsoll.engine.steps import Steps
from plimsoll.errors import ConfigError
from plimsoll.run.files import explained, write_whole

_FORM = "form.json"

Rows = Mapping[str, Sequence[Tensor]]
"""By what they are (master, exp_avg, ...): a flat tensor for each master of the rank."""


@dataclass(frozen=True)
class Form:
    """How a role is trained, and how it is divided over the ranks."""

    ranks: int
    stage: int
    dtype: str
    optimizer_offload: str
    quantization: str
    adapter: str
    optimizer: str
    ema: bool

    @classmethod
    def of(cls, role: TrainedRole, ranks: int) -> Form:
        return cls(
            ranks,
            role.zero.stage,
            role.model.dtype,
            role.zero.optimizer_offload,
            role.model.quantization,
            "none" if role.adapter is None else role.adapter.model_dump_json(),
            role.optimizer.kind,
            role.ema is not None,
        )

    def unlike(self, written: Form) -> list[str]:
        """The settings that keep a role of this form from going on from what was written in the
        other, as `key: then -> now`."""
        then, now = self._divided_anew(written)._settings(), self._settings()
        return [
            f"{key}: {show(then[key])} -> {show(value)}"
            for key, value in now.items()
            if key in then and then[key] != value
        ]

    def _divided_anew(self, written: Form) -> Form:
        """What was written, divided as this form; moments in 8 bits cannot be."""
        if self.optimizer == "adamw_8bit":
            return written
        return replace(
            written,
            ranks=self.ranks,
            stage=self.stage,
            dtype=self.dtype,
            optimizer_offload=self.optimizer_offload,
        )

    def _settings(self) -> dict[str, object]:
        """By their keys, those of the role without its name."""
        adapter = {} if self.adapter == "none" else json.loads(self.adapter)
        return {
            "cluster.ranks": self.ranks,
            "zero.stage": self.stage,
            "zero.optimizer_offload": self.optimizer_offload,
            "model.dtype": self.dtype,
            "model.quantization": self.quantization,
            "adapter": "given" if adapter else "none",
            **{f"adapter.{name}": value for name, value in adapter.items()},
            "optimizer.kind": self.optimizer,
            "ema": "given" if self.ema else "none",
        }


def write_form(form: Form, steps: Steps, directory: Path) -> None:
    """Say in a checkpoint what it is of."""
    text = json.dumps({"form": asdict(form), "steps": asdict(steps)}, indent=2)
    write_whole(directory / _FORM, text + "\n")


def read_form(form: Form, directory: Path) -> Steps:
    """The steps that a checkpoint comes after.

    Raises:
        ConfigError: it is not there, or a role of this form cannot go on from it.
    """
    try:
        found = json.loads((directory / _FORM).read_text(encoding="utf-8"))
        written, steps = Form(**found["form"]), Steps(**found["steps"])
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise broken(directory, f"{_FORM}: {error}") from error
    if unlike := form.unlike(written):
        raise ConfigError(
            f"The checkpoint {directory} was written with other settings (then -> now): "
            f"{', '.join(unlike)}. {_why_not(form)} Give these as they were then to go on with the "
            f"run, or begin another run.directory from a saved model ({directory.name}.model.path)."
        )
    return steps


def _why_not(form: Form) -> str:
    if form.optimizer == "adamw_8bit":
        return "Moments in 8 bits are quantised in blocks, and cannot be divided anew."
    return (
        "Masters and moments can be divided anew (ranks, stage, offload, dtype), but not become "
        "those of another adapter, quantization or optimizer, or an average that was not kept."
    )


def write_rows(rows: Rows, parts: Sequence[Part], directory: Path, rank: int) -> None:
    """Write this rank's stretches."""
    for number, tensors in enumerate(_files(_stretches(rows, parts))):
        _write(tensors, directory / f"rank-{rank:05d}-{number:05d}.safetensors")


def _write(tensors: dict[str, Tensor], path: Path) -> None:
    with explained(path):
        save_checked(tensors, path)


def _stretches(rows: Rows, parts: Sequence[Part]) -> Iterator[tuple[str, Tensor]]:
    """Cut so that each fits a file."""
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


def read_rows(rows: Rows, parts: Sequence[Part], directory: Path) -> None:
    """Fill this rank's stretches with what all ranks wrote.

    Raises:
        ConfigError: a file cannot be read, or an element is in none.
    """
    missing = len(rows) * sum(part.size for part in parts)
    by_name: dict[str, list[Part]] = {}
    for part in parts:
        by_name.setdefault(part.name, []).append(part)
    try:
        for path in sorted(directory.glob("rank-*-*.safetensors")):
            missing -= _read_file(path, rows, by_name)
    except (OSError, SafetensorError) as error:
        raise broken(directory, str(error)) from error
    if missing:
        raise broken(directory, f"{missing} of the elements that this rank holds are in no file")


def _read_file(path: Path, rows: Rows, by_name: Mapping[str, Sequence[Part]]) -> int:
    """The number of elements that were wanted of this file."""
    read = 0
    with safe_open(path, "pt") as file:
        written = checksums(file)
        for key in file.keys():  # noqa: SIM118
            kind, start, name = key.split("/", 2)
            for part in by_name.get(name, ()) if kind in rows else ():
                stretch = file.get_slice(key)
                begin = max(part.start, int(start))
                end = min(part.start + part.size, int(start) + stretch.get_shape()[0])
                if begin < end:
                    place = part.offset + begin - part.start
                    found = stretch[begin - int(start) : end - int(start)]
                    if [len(found)] == stretch.get_shape():
                        check(written, key, found)
                    rows[kind][part.master].narrow(0, place, end - begin).copy_(found)
                    read += end - begin
    return read


def read_weights(directory: Path, kind: str) -> dict[str, Tensor]:
    """Whole weights, flat, by their names in the module, of what all ranks wrote of a kind, such as
    `master`; mapped from the files where one stretch holds all.

    Raises:
        ConfigError: a file cannot be read, a stretch is missing, or there are none of the kind.
    """
    found: dict[str, list[tuple[int, Tensor]]] = {}
    try:
        for path in sorted(directory.glob("rank-*-*.safetensors")):
            with safe_open(path, "pt") as file:
                written = checksums(file)
                for key in file.keys():  # noqa: SIM118
                    its_kind, start, name = key.split("/", 2)
                    if its_kind == kind:
                        piece = file.get_tensor(key)
                        check(written, key, piece)
                        found.setdefault(name, []).append((int(start), piece))
    except (OSError, SafetensorError) as error:
        raise broken(directory, str(error)) from error
    if not found:
        raise broken(directory, f"no file holds a stretch of {kind}")
    return {name: _joined(directory, name, pieces) for name, pieces in found.items()}


def _joined(directory: Path, name: str, pieces: Sequence[tuple[int, Tensor]]) -> Tensor:
    ordered = sorted(pieces, key=lambda piece: piece[0])
    expected = 0
    for start, piece in ordered:
        if start != expected:
            raise broken(directory, f"{name} has no element {expected}")
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
    """What `write_blocks` wrote, by the number of the master."""
    states: dict[int, dict[str, Tensor]] = {}
    try:
        with safe_open(directory / _blocks(rank), "pt") as file:
            written = checksums(file)
            for key in file.keys():  # noqa: SIM118
                number, name = key.split("/", 1)
                tensor = states.setdefault(int(number), {})[name] = file.get_tensor(key)
                check(written, key, tensor)
    except (OSError, SafetensorError) as error:
        raise broken(directory, str(error)) from error
    return states


def _blocks(rank: int) -> str:
    return f"blocks-{rank:05d}.safetensors"


def broken(directory: Path, why: str) -> ConfigError:
    """The error of a checkpoint that lacks something."""
    return ConfigError(
        f"{directory} holds no whole checkpoint of this role ({why}). Resume from another "
        f"checkpoint (remove this one), or start a new run.directory."
    )
