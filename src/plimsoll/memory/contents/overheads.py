"""Memory of a process besides tensors, and the allocator's gap.

This memory is the interpreter and libraries, the CUDA context, communicators and Ray. Its constants
depend on versions and machines; a calibration changes nothing else.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from plimsoll.config.cluster import Device
from plimsoll.errors import ConfigError
from plimsoll.memory.contents.layout import Process
from plimsoll.run.files import write_whole
from plimsoll.timeline.items import Item, Where

MIB = 2**20

_HERE = "measured: Linux, Python 3.11, torch 2.13 (CPU build), DeepSpeed 0.19.8, Ray 2.60"

_SOURCES = {
    "cuda_context": "published: 0.5 to 1.8 GiB with kernels loaded; the middle",
    "nccl_communicator": "published: 0.5 to 0.7 GB a communicator",
    "allocator_gap": "published: reserved over allocated bytes, 5 to 7 %. Segments that grow: 0 to "
    "2 %, three runs of an H200 replayed (benchmarks/allocator_replay.py); unseen on a card yet."
    " Fixed ones, which a user's settings may choose: 18 to 40 % on that H200",
    "worker_process": f"{_HERE}: resident beside tensors once its first engine is made, 491 MB",
    "cuda_libraries": "published: host memory of a process with a CUDA context, 2 to 3 GB",
    "cuda_build": "measured: torch 2.13 for CUDA 13.0, with transformers and DeepSpeed: 721 MiB "
    "resident instead of 357 with its CPU build",
    "controller_process": f"{_HERE}: with torch, transformers and Ray, 457 to 515 MiB",
    "kernel_cache": f"{_HERE}: what is resident beside tensors later on, 580 MB of SFT after 60 "
    "steps, 600 of DPO and 585 of PPO (657 with trajectory_libraries) after 8, less worker_process",
    "adapter_libraries": f"{_HERE}: what importing PEFT 0.21 adds, 55 MB",
    "trajectory_libraries": f"{_HERE}: what the first Parquet file adds, 40 MiB and 29 of code",
    "engine_process": "measured: vLLM 0.32 (CPU build), after three batches and without KV cache "
    "and weights: front 554 MB, core 635 MB",
    "ray_actor": f"{_HERE}: what Ray adds to a worker, 33 MiB, and its own pages",
    "ray_node": f"{_HERE}: gcs_server, raylet, agents and idle workers, 600 MiB",
}


FIXED_SEGMENTS_GAP = 0.29
"""The allocator's gap with fixed segments.

It is the middle of the 18 to 40 % that four runs on an H200 reserved beyond their live tensors.
"""


@dataclass(frozen=True)
class Constants:
    """The constants of processes, in bytes; `allocator_gap` alone is a share.

    Attributes:
        cuda_context: CUDA context of a process on a card, with kernels loaded.
        nccl_communicator: bytes on a card for each communicator of more than one rank.
        allocator_gap: reserved but unallocated device bytes, as a share of the allocated bytes.
        worker_process: resident memory of a training rank without tensors.
        cuda_libraries: host memory that CUDA adds to a process on a card.
        cuda_build: memory that torch's build for CUDA adds to a process that uses no card.
        controller_process: resident memory of the process that runs the loop, without tensors.
        kernel_cache: kernels that a process keeps if it computes on CPU (`kernel_limits` in
            trainer/process_group.py).
        adapter_libraries: memory that PEFT and bitsandbytes add where an adapter is trained.
        trajectory_libraries: pandas, which pyarrow imports to make a table, in the process that
            writes the trajectories.
        engine_process: resident memory of each process of an engine (front, core, further workers)
            without weights and KV cache.
        ray_actor: memory that Ray adds to each worker.
        ray_node: Ray's own processes on a node, without the contents of the object store.
        sources: the source of each number, by name.
    """

    cuda_context: int = 1_180 * MIB
    nccl_communicator: int = 570 * MIB
    allocator_gap: float = 0.05
    worker_process: int = 468 * MIB
    cuda_libraries: int = 2_300 * MIB
    cuda_build: int = 364 * MIB
    controller_process: int = 480 * MIB
    kernel_cache: int = 95 * MIB
    adapter_libraries: int = 52 * MIB
    trajectory_libraries: int = 69 * MIB
    engine_process: int = 570 * MIB
    ray_actor: int = 40 * MIB
    ray_node: int = 600 * MIB
    sources: Mapping[str, str] = field(
        default_factory=lambda: MappingProxyType(_SOURCES), hash=False
    )

    def with_measured(self, source: str, **values: float) -> Constants:
        """Return the constants with measured values; `source` says where they were measured."""
        merged = dict(self.sources) | dict.fromkeys(values, source)
        return replace(self, **values, sources=MappingProxyType(merged))  # type: ignore[arg-type]

    def calibrations(self) -> dict[str, list[str]]:
        """Return the names of the calibrated constants, grouped by source."""
        names: dict[str, list[str]] = {}
        for name in NUMBERS:
            if self.sources[name] != _SOURCES[name]:
                names.setdefault(self.sources[name], []).append(name)
        return names


NUMBERS = tuple(number.name for number in fields(Constants) if number.name != "sources")


def read_constants(path: Path) -> Constants:
    """Return the constants of a calibration file that `write_constants` wrote.

    Raises ConfigError with path and reason if the file cannot be read, is no calibration, or has
    impossible values.
    """
    way = "Write one with `plimsoll calibrate`, or do without: then the shipped constants count."
    with _as_config_error(f"{path} is no calibration", way):
        return _constants(json.loads(path.read_text(encoding="utf-8")))


def read_plan_constants(path: Path) -> Constants:
    """Return the constants that a plan.json was made with.

    Raises ConfigError with path and reason if they cannot be read.
    """
    wrong = f"{path} does not tell with which constants the run was planned"
    with _as_config_error(wrong, "Give runs that have been planned, by this version."):
        return _constants(json.loads(path.read_text(encoding="utf-8"))["constants"])


@contextmanager
def _as_config_error(wrong: str, way_out: str) -> Iterator[None]:
    """Turn read errors inside the block into ConfigError."""
    try:
        yield
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise ConfigError(f"{wrong}: {error!r}. {way_out}") from error


def _constants(stored: Mapping[str, Any]) -> Constants:
    values = {name: _number(name, entry["value"]) for name, entry in stored.items()}
    sources = {name: str(entry["source"]) for name, entry in stored.items()}
    merged = MappingProxyType(_SOURCES | sources)
    return replace(Constants(), **values, sources=merged)  # type: ignore[arg-type]


def write_constants(constants: Constants, path: Path) -> None:
    """Write the calibrated constants as JSON, each with its source.

    The file is written completely or not at all.
    """
    values = constant_values(constants)
    names = (name for names in constants.calibrations().values() for name in names)
    calibrated = {name: values[name] for name in names}
    write_whole(path, json.dumps(calibrated, indent=2) + "\n")


def constant_values(constants: Constants) -> dict[str, dict[str, float | str]]:
    """Return a dict from the name of each constant to its value and source."""
    return {
        name: {"value": getattr(constants, name), "source": constants.sources[name]}
        for name in NUMBERS
    }


def _number(name: str, value: object) -> float:
    if name not in NUMBERS:
        raise ValueError(f"{name} is none of {', '.join(NUMBERS)}")
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{name} is {value!r}, not a number")
    if not math.isfinite(value) or value < 0:
        raise ValueError(f"{name} is {value}, which no memory can be")
    return value if name == "allocator_gap" else int(value)


_NAMES: Mapping[str, str] = {
    "worker_process": "interpreter and libraries",
    "controller_process": "interpreter and libraries",
    "engine_process": "interpreter and vLLM",
    "ray_actor": "Ray in each process",
    "ray_node": "Ray's own processes",
    "cuda_build": "torch's CUDA build",
    "cuda_libraries": "CUDA libraries",
    "cuda_context": "CUDA context",
    "nccl_communicator": "NCCL communicator",
    "adapter_libraries": "PEFT and bitsandbytes",
    "kernel_cache": "prepared kernels",
    "trajectory_libraries": "pyarrow and pandas",
}
_ON_DEVICE = ("cuda_context", "nccl_communicator")


def process_items(
    process: Process,
    device: Device,
    group: int,
    communicators: int,
    libraries: str,
    cuda_build: bool,
    constants: Constants,
) -> Iterator[Item]:
    """Yield the memory of a process that does not depend on its work.

    Args:
        process: the process.
        device: the device on which the run computes.
        group: the number of processes in its communicator; for an engine's front, in the
            communicator of its workers.
        communicators: the number of NCCL communicators that it is in, if it has a card.
        libraries: the name of the constant for the libraries of an engine's processes.
        cuda_build: whether the node has torch's build for CUDA, as in `Node`.
        constants: the constants.
    """
    processes = _process_count(process, device, group)
    for name in _resident(process, libraries):
        count = processes if name == "engine_process" else 1
        yield constant_item(name, constants, count)
    if cuda_build and device == "cpu" and process.kind != "ray":
        yield constant_item(
            "cuda_build", constants, processes if libraries == "engine_process" else 1
        )
    if device == "cpu" or process.slot.card is None:
        return
    yield constant_item("cuda_libraries", constants)
    yield constant_item("cuda_context", constants)
    if communicators:
        yield constant_item("nccl_communicator", constants, communicators)


def _process_count(process: Process, device: Device, group: int) -> int:
    """Return 2 for an engine's front whose core is a second process, else 1.

    With one card, core and worker are one process (vLLM: v1/executor/uniproc_executor.py).
    """
    return 2 if process.kind == "engine" and (device == "cpu" or group > 1) else 1


def _resident(process: Process, libraries: str) -> tuple[str, ...]:
    """Return the names of the constants that a process of this kind always holds on its host."""
    match process.kind:
        case "local":
            return ("worker_process",)
        case "controller":
            return ("controller_process",)
        case "ray":
            return ("ray_node",)
        case "engine worker":
            return (libraries,)
        case "engine":
            return (libraries, "ray_actor")
        case "rank" | "critic rank" | "reward rank":
            return ("worker_process", "ray_actor")


def constant_item(constant: str, constants: Constants, processes: int = 1) -> Item:
    """Return the item of a constant for a number of processes."""
    each: int = getattr(constants, constant)
    where: Where = "device" if constant in _ON_DEVICE else "host"
    words = f"{each:,} bytes a process" + (f" x {processes} processes" if processes > 1 else "")
    size, source = processes * each, constants.sources[constant]
    return Item("process", "processes", _NAMES[constant], where, "process", size, words, source)
