"""What a process holds besides tensors: interpreter and libraries, CUDA context, communicators."""

from __future__ import annotations

from collections.abc import Iterator

from plimsoll.config.deepspeed import Device
from plimsoll.memory.contents.layout import Process
from plimsoll.memory.items import Item, Where
from plimsoll.memory.price.overheads import Constants


def process_items(
    process: Process,
    device: Device,
    group: int,
    vllm: bool,
    adapted: bool,
    cuda_build: bool,
    constants: Constants,
) -> Iterator[Item]:
    """group: how many processes its communicator joins; of an engine's front, its workers'. vllm:
    whether engines run vLLM. adapted: whether it trains an adapter. cuda_build: as of `Node`."""
    vllm_processes = _with_core(process, device, group)
    yield from _on_host(process, vllm, vllm_processes, constants)
    if cuda_build and device == "cpu" and process.kind != "ray":
        processes = vllm_processes if vllm else 1
        yield _constant("torch's CUDA build", "host", "cuda_build", constants, processes)
    if adapted:
        yield _constant("PEFT and bitsandbytes", "host", "adapter_libraries", constants)
    if device == "cpu" or process.slot.card is None:
        return
    yield _constant("CUDA libraries", "host", "cuda_libraries", constants)
    yield _constant("CUDA context", "device", "cuda_context", constants)
    if group > 1:
        yield _constant("NCCL communicator", "device", "nccl_communicator", constants)


def _with_core(process: Process, device: Device, group: int) -> int:
    """An engine's front has its core beside it: the worker's own process, where there is one card
    (vLLM: v1/executor/uniproc_executor.py)."""
    return 2 if process.kind == "engine" and (device == "cpu" or group > 1) else 1


def computing_items(
    process: Process, device: Device, narrow: bool, constants: Constants
) -> Iterator[Item]:
    """What a process that computes on CPU holds besides, from its first forward on.

    narrow: it computes in 16 bits. Products of fp32 are not prepared by shape: a new one hardly
        costs anything.
    """
    if device == "cpu" and narrow and process.kind not in ("recipe", "ray"):
        yield _constant("prepared kernels", "host", "kernel_cache", constants)


def writing_items(process: Process, constants: Constants) -> Iterator[Item]:
    """What the process that writes trajectories holds besides, from the first ones on."""
    if process.kind in ("local", "recipe"):
        yield _constant("pyarrow and pandas", "host", "trajectory_libraries", constants)


def drawing_items(process: Process, constants: Constants) -> Iterator[Item]:
    """What the process that draws the calibration of a reward model holds besides."""
    if process.kind in ("local", "recipe"):
        yield _constant("matplotlib", "host", "drawing_libraries", constants)


def _on_host(
    process: Process, vllm: bool, vllm_processes: int, constants: Constants
) -> Iterator[Item]:
    match process.kind:
        case "local":
            yield _constant("interpreter and libraries", "host", "worker_process", constants)
        case "recipe":
            yield _constant("interpreter and libraries", "host", "controller_process", constants)
        case "ray":
            yield _constant("Ray's own processes", "host", "ray_node", constants)
        case "engine" if vllm:
            name = "interpreter and vLLM"
            yield _constant(name, "host", "vllm_process", constants, vllm_processes)
            yield _constant("Ray in each process", "host", "ray_actor", constants)
        case "rank" | "critic rank" | "engine":
            yield _constant("interpreter and libraries", "host", "worker_process", constants)
            yield _constant("Ray in each process", "host", "ray_actor", constants)
        case "engine worker":
            yield _constant("interpreter and vLLM", "host", "vllm_process", constants)


def _constant(
    name: str, where: Where, constant: str, constants: Constants, processes: int = 1
) -> Item:
    each: int = getattr(constants, constant)
    source = constants.sources[constant]
    words = f"{each:,} bytes a process" + (f" x {processes} processes" if processes > 1 else "")
    return Item("process", name, where, "process", processes * each, words, source)
