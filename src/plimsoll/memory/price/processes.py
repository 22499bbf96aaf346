"""What a process holds besides tensors: interpreter and libraries, CUDA context, communicators."""

from __future__ import annotations

from collections.abc import Iterator

from plimsoll.config.deepspeed import Device
from plimsoll.memory.items import Item, Where
from plimsoll.memory.plan.layout import Process
from plimsoll.memory.price.overheads import MIB, Constants

_VLLM_PROCESS = 1400 * MIB
_VLLM_SOURCE = "measured: an actor with vLLM 0.32 (CPU build), without KV cache and weights"


def process_items(
    process: Process, device: Device, group: int, vllm: bool, constants: Constants
) -> Iterator[Item]:
    """group: how many processes its communicator joins. vllm: whether engines run vLLM."""
    yield from _on_host(process, vllm, constants)
    if device == "cpu" or process.slot.card is None:
        return
    yield _constant("CUDA libraries", "host", "cuda_libraries", constants)
    yield _constant("CUDA context", "device", "cuda_context", constants)
    if group > 1:
        yield _constant("NCCL communicator", "device", "nccl_communicator", constants)


def _on_host(process: Process, vllm: bool, constants: Constants) -> Iterator[Item]:
    match process.kind:
        case "local":
            yield _constant("interpreter and libraries", "host", "worker_process", constants)
        case "recipe":
            yield _constant("interpreter and libraries", "host", "controller_process", constants)
        case "ray":
            yield _constant("Ray's own processes", "host", "ray_node", constants)
        case "engine" if vllm:
            yield _vllm("interpreter and vLLM")
            yield _constant("Ray in each process", "host", "ray_actor", constants)
        case "rank" | "critic rank" | "engine":
            yield _constant("interpreter and libraries", "host", "worker_process", constants)
            yield _constant("Ray in each process", "host", "ray_actor", constants)
        case "engine worker":
            yield _vllm("interpreter and vLLM")


def _constant(name: str, where: Where, constant: str, constants: Constants) -> Item:
    size: int = getattr(constants, constant)
    source = constants.sources[constant]
    return Item("process", name, where, "process", size, f"{size:,} bytes a process", source)


def _vllm(name: str) -> Item:
    formula = f"{_VLLM_PROCESS:,} bytes a process"
    return Item("process", name, "host", "process", _VLLM_PROCESS, formula, _VLLM_SOURCE)
