"""The rules of `plimsoll doctor` about installed packages and GPUs, and the list of all rules."""

from __future__ import annotations

import re
from collections.abc import Iterator

from plimsoll.commands.doctor import limits
from plimsoll.commands.doctor.machine import Machine
from plimsoll.config.problems import Problem, Severity, finding
from plimsoll.machine.hardware import BFLOAT16_UNITS
from plimsoll.machine.nvidia import CardProcess, LiveCard
from plimsoll.machine.tools import FOR_TRITON, how_to_install
from plimsoll.machine.versions import LIGER, PACKAGES, package_finding
from plimsoll.process.programs import REMEDY
from plimsoll.resolve.engine_rules import Compiled, Installed, every_engine
from plimsoll.run.numbers import bytes_text, plural

_OLDEST_PYTHON, _NEWEST_PYTHON = (3, 11), (3, 12)
_BUSY_BYTES = 2**30  # an idle card shows some hundred MiB, more with a display
_LIGER_KERNELS = Compiled("kernels of Liger (Triton)", FOR_TRITON, ("cuda",))


def _python(machine: Machine) -> Iterator[Problem]:
    """Check the version of the interpreter."""
    version, what = machine.python[:2], ".".join(map(str, machine.python))
    severity: Severity = "warning" if version > _NEWEST_PYTHON else "ok"
    if version < _OLDEST_PYTHON:
        severity = "error"
    why, fix = "3.11 and 3.12 are tested.", "use Python 3.11 or 3.12"
    yield finding("python", severity, what, why, fix)


def _packages(machine: Machine) -> Iterator[Problem]:
    """Check the packages of every run, then those of engines, then those of some runs only."""
    versions, has_cuda_build = machine.versions, machine.torch.cuda is not None
    installed = Installed(versions, machine.tools, machine.has_gpus, has_cuda_build)
    packages = [p for p in PACKAGES if p.name != LIGER or machine.has_gpus]
    yield from (package_finding(p, versions[p.name]) for p in packages if not p.use)
    for rules in every_engine():
        yield from rules.doctor(installed)
    yield from (package_finding(p, versions[p.name]) for p in packages if p.use)


def _cuda(machine: Machine) -> Iterator[Problem]:
    """Check that torch can use the GPUs that the driver shows."""
    torch, cards, in_all = machine.torch, machine.cards, machine.cards_in_all
    severity: Severity = "error"
    build = f"CUDA {torch.cuda}" if torch.cuda else "no CUDA"
    if not torch.imported:
        what, why = "torch cannot be imported", torch.trouble
        fix = "install torch again (make setup), and see what `python -c 'import torch'` says"
    elif machine.driver_trouble:
        what, why = "no working driver", machine.driver_trouble
        fix = "make `nvidia-smi` work first; without GPUs, remove the driver"
    elif not in_all and torch.available:
        what = f"torch for CUDA {torch.cuda}, no nvidia-smi"
        why = "torch sees a GPU, and there is no nvidia-smi: plans are made without it."
        fix = "NVIDIA_DRIVER_CAPABILITIES=compute,utility brings it into a container"
    elif not in_all:
        severity, what, why, fix = "ok", "no NVIDIA GPU: runs are on the CPU", "", ""
    elif not cards:
        severity, what = "warning", f"0 of {in_all} GPUs visible"
        why = "CUDA_VISIBLE_DEVICES hides all GPUs: runs are on the CPU."
        fix = "unset CUDA_VISIBLE_DEVICES, or name the GPUs that runs may use"
    else:
        what = f"driver {cards[0].driver}, torch for {build}, {len(cards)} of {in_all} GPUs"
        severity, why, fix = _torch_build(machine)
    yield finding("cuda", severity, what, why, fix)


def _torch_build(machine: Machine) -> tuple[Severity, str, str]:
    """Return (severity, reason, remedy) for torch's build on a machine with visible GPUs."""
    torch = machine.torch
    if torch.cuda is None:
        why = "This torch is a build for the CPU, and there are GPUs."
        return "error", why, "make BACKEND=gpu setup"
    if not torch.available:
        fix = f"update the driver to one for CUDA {torch.cuda}, or install a torch for the driver"
        return "error", torch.trouble or "torch finds no GPU that it can use.", fix
    return "ok", "", ""


def _gpus(machine: Machine) -> Iterator[Problem]:
    """Check each visible card's free memory and its kernels."""
    for card in machine.cards:
        yield _gpu_memory(card)
        if card.compute_capability is not None:
            yield _gpu_kernels(card.index, card.compute_capability, machine.torch.kernels)


def _gpu_memory(card: LiveCard) -> Problem:
    """Return a finding about a card's free memory, and the processes that hold the rest."""
    key = f"gpu {card.index}"
    if card.instances:
        what = f"{card.name}, cut by MIG into {plural(len(card.instances), 'instance')}"
        why = "The instance that a run would use is unknown here, and to `plimsoll plan`."
        fix = "CUDA_VISIBLE_DEVICES: its UUID; or cluster.hardware: its bytes, such as 9.5GiB"
        return finding(key, "warning", what, why, fix)
    if not card.total_bytes:
        why = "The driver does not report its memory, as for cards that share the host's memory: "
        fix = "cluster.hardware: the bytes that a run may fill, such as 90GiB"
        return finding(key, "warning", card.name, why + "`plimsoll plan` cannot use it.", fix)
    what = f"{card.name}, {bytes_text(card.free_bytes)} of {bytes_text(card.usable_bytes)} free"
    if card.used_bytes <= _BUSY_BYTES and not card.processes:
        return finding(key, "ok", what)
    held = ", ".join(map(_holder, card.processes)) or "processes that are hidden from here"
    severity: Severity = "error" if 2 * card.free_bytes < card.usable_bytes else "warning"
    why = (
        f"{bytes_text(card.used_bytes)} are held by {held}. Plans are made for a whole card, and "
        f"vLLM's share is one of the whole card, and must be free when it starts."
    )
    pids = " ".join(str(process.pid) for process in card.processes)
    end = f"end them (kill {pids})" if pids else "end them outside of this container"
    return finding(key, severity, what, why, f"{end}, or leave it out by CUDA_VISIBLE_DEVICES")


def _holder(process: CardProcess) -> str:
    held = "" if process.bytes is None else f", {bytes_text(process.bytes)}"
    return f"{process.name} (pid {process.pid}{held})"


def _gpu_kernels(index: int, capability: tuple[int, int], kernels: tuple[str, ...]) -> Problem:
    """Return a finding about a card's bfloat16 and packed attention.

    It is an error if none of torch's `kernels` runs on the card.
    """
    key, (major, minor) = f"gpu {index} bf16", capability
    what = f"compute capability {major}.{minor}"
    if kernels and not any(_runs_on(kernel, capability) for kernel in kernels):
        why = f"This torch has kernels for {', '.join(kernels)} only: runs end with `no kernel "
        why += "image is available for execution on the device`."
        fix = f"install a build of torch for sm_{major}{minor}, or leave it out by "
        return finding(key, "error", what, why, fix + "CUDA_VISIBLE_DEVICES")
    if capability < BFLOAT16_UNITS:
        why = "bfloat16 and packed attention (varlen) need 8.0 or higher."
        fix = "actor.model.dtype: float32 and actor.model.attention: sdpa"
        return finding(key, "warning", what, why, fix)
    return finding(key, "ok", f"{what}: bfloat16 and packed attention")


def _runs_on(kernel: str, capability: tuple[int, int]) -> bool:
    """Return whether a torch kernel such as `sm_80` runs on a card of a compute capability.

    sm_80 runs on 8.0 and higher 8.x. compute_80 also runs on newer cards, as it is compiled when it
    is loaded (CUDA C++ programming guide, binary and PTX compatibility).
    """
    match = re.fullmatch(r"(sm|compute)_(\d+)(\d)(a?)f?", kernel)
    if match is None:
        return False
    built = int(match[2]), int(match[3])
    if match[4]:  # sm_90a runs on this card only
        return built == capability
    return built <= capability and (match[1] == "compute" or built[0] == capability[0])


def _compilers(machine: Machine) -> Iterator[Problem]:
    """Check that the tools with which engines and Triton compile are installed."""
    device, tools = "cuda" if machine.has_gpus else "cpu", machine.tools
    parts = [*(part for rules in every_engine() for part in rules.compiled), _LIGER_KERNELS]
    here = [part for part in parts if device in part.devices]
    needed = [tool for tool in tools if any(tool in part.tools for part in here)]
    missing = [tool for tool in needed if not tools[tool]]
    built = " and ".join(part.what for part in here if {*missing} & {*part.tools})
    there = ", ".join(tool for tool in needed if tools[tool]) or "none"
    why = f"{' and '.join(missing)} missing: {built} cannot be compiled."
    yield finding("compilers", "warning" if missing else "ok", there, why, how_to_install(missing))


def _ray(machine: Machine) -> Iterator[Problem]:
    """Check that Ray can be imported, and answers at its address."""
    view = machine.ray
    if machine.versions["ray"] is not None and view.trouble:
        fix = "install ray again (make setup)"
        yield finding("ray import", "error", "fails", view.trouble, fix)
    if view.address is None:
        return
    if not view.silence:
        yield finding("ray address", "ok", f"{view.address} answers")
    else:
        fix = "give host:port of the head node, and start it there with `ray start --head`"
        yield finding("ray address", "error", f"{view.address}: no answer", view.silence, fix)


def _sandbox(machine: Machine) -> Iterator[Problem]:
    """Check the sandbox for programs of a policy, which only the reward `code` needs."""
    found = machine.sandbox
    if found.bubblewrap is None:
        yield finding("sandbox", "warning", "bwrap does not work", found.trouble, REMEDY)
    else:
        what = f"{found.bubblewrap}; memory and processes: {found.limits}"
        fix = "run programs of a policy on another machine, by `plimsoll serve-reward`"
        yield finding("sandbox", "warning" if found.weakness else "ok", what, found.weakness, fix)


MACHINE_RULES = (
    _python,
    _packages,
    _cuda,
    _gpus,
    *(limits.memory, limits.cores, limits.shared_memory, limits.run_disk, limits.temporary_disk),
    _compilers,
    _ray,
    _sandbox,
)
"""All rules, in the order in which `plimsoll doctor` shows their findings."""
