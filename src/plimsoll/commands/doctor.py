"""`plimsoll doctor`: report whether this machine can run jobs, and how to correct its faults.

doctor_machine.py observes the machine. The rules here judge memory, cores, disks, installed
packages and GPUs.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from rich.text import Text

from plimsoll.cluster.ray_access import longest_temporary, private_folder
from plimsoll.commands.doctor_machine import Disk, Machine
from plimsoll.config.problems import Problem, Severity, find, finding
from plimsoll.errors import PlimsollError
from plimsoll.machine.hardware import BFLOAT16_UNITS
from plimsoll.machine.nvidia import LiveCard
from plimsoll.machine.versions import FOR_TRITON, LIGER, PACKAGES, how_to_install, package_finding
from plimsoll.memory.plan import wrap_lines
from plimsoll.process.programs import REMEDY
from plimsoll.resolve.engine_rules import Compiled, Installed, every_engine
from plimsoll.run.console import Terminal
from plimsoll.run.numbers import bytes_text, plural

_GIB = 2**30
_TIGHT_MEMORY = 0.25  # share of the memory that this process may fill
_LEAST_SHARED = _GIB  # Docker gives 64 MiB; NCCL alone takes some tens of MiB a rank
_RAY_SHARE = 0.3  # share of the memory for Ray's object store (ray_constants.py)
_RAY_FULL = 0.05  # free share: Ray spills no objects to a fuller disk
_LEAST_DISK, _TIGHT_DISK = _GIB, 20 * _GIB
_LEAST_TEMPORARY = 2**26  # Ray's logs; a short run on two ranks writes some MB
_OTHER_DIRECTORY = "choose another run.directory"


def memory(machine: Machine) -> Iterator[Problem]:
    """Yield a finding about the free host memory."""
    host = machine.memory
    what = f"{bytes_text(host.free_bytes)} of {bytes_text(host.capacity_bytes)} free"
    if host.capacity_bytes < host.total_bytes:
        what += f" (a cgroup allows this much of {bytes_text(host.total_bytes)})"
    tight = host.free_bytes < _TIGHT_MEMORY * host.capacity_bytes
    why = "Others hold most of it: a run may not get what its plan counts on."
    fix = "end what holds it (ps aux --sort=-rss)"
    yield finding("host memory", "warning" if tight else "ok", what, why, fix)


def cores(machine: Machine) -> Iterator[Problem]:
    """Yield a finding about the cores, and whether they multiply bfloat16 (for `dtype: auto`)."""
    what = f"{machine.cores:,}"
    if machine.cores < machine.cores_in_all:
        what += f" of {machine.cores_in_all:,} (affinity, or a cgroup's quota)"
    what += ", which multiply bfloat16" if machine.bfloat16 else ", without bfloat16: float32 there"
    yield finding("cores", "ok", what)


def shared_memory(machine: Machine) -> Iterator[Problem]:
    """Yield a finding about /dev/shm, which holds NCCL's buffers and Ray's object store."""
    shared, host = machine.shared, machine.memory
    what = f"{bytes_text(shared.free_bytes)} of {bytes_text(shared.total_bytes)} free"
    size = f"docker run --shm-size={max(1, round(_RAY_SHARE * host.capacity_bytes / _GIB))}g"
    fix = f"{size} (or --ipc=host); delete what is left over in {shared.path}"
    if machine.has_gpus and shared.free_bytes < _LEAST_SHARED:
        why = "NCCL ends with `No space left on device` or a bus error, and Ray goes to the disk."
        yield finding("shared memory", "error", what, why, fix)
    else:
        tight = shared.free_bytes < _RAY_SHARE * host.free_bytes
        why = "Ray wants 30 % of the memory here; with less its object store is on the disk, slow."
        yield finding("shared memory", "warning" if tight else "ok", what, why, fix)


def run_disk(machine: Machine) -> Iterator[Problem]:
    """Check the disk of the run directory."""
    disk = machine.runs
    severity: Severity = "ok"
    if not disk.writable or disk.free_bytes < _LEAST_DISK:
        severity = "error"
    elif disk.free_bytes < _TIGHT_DISK:
        severity = "warning"
    why = "A checkpoint takes about 14 bytes a parameter: 7 GB for a model of 0.5B."
    fix = f"make room, or {_OTHER_DIRECTORY}"
    if not disk.writable:
        why, fix = "Checkpoints, metrics and the model go there.", _OTHER_DIRECTORY
    yield finding("run disk", severity, _describe_disk(disk), why, fix)


def temporary_disk(machine: Machine) -> Iterator[Problem]:
    """Check the disk on which Ray keeps its sessions and spilled objects."""
    disk = machine.temporary
    severity: Severity = "error"
    what, fix = _describe_disk(disk, f"/{private_folder().name}"), "make room, or set TMPDIR"
    if disk.free_bytes < _LEAST_TEMPORARY or not disk.writable:
        why = "Ray keeps its logs and sessions there and cannot start."
    elif len(os.fsencode(disk.path)) > longest_temporary():
        why = "Ray's sockets are below it, and their paths are over the system's 107 bytes."
        fix = f"set TMPDIR to a path of at most {longest_temporary()} bytes"
    else:
        tight = disk.free_bytes < max(_LEAST_DISK, _RAY_FULL * disk.total_bytes)
        severity = "warning" if tight else "ok"
        why = "Ray puts objects there that memory has no room for, unless it is over 95 % full."
    yield finding("temporary disk", severity, what, why, fix)


def _describe_disk(disk: Disk, below: str = "") -> str:
    """Return a text: the free bytes of a disk, or that it is not writable.

    `below` is the folder of the disk that must be writable.
    """
    if not disk.writable:
        return f"{disk.path}{below} cannot be written to"
    return f"{bytes_text(disk.free_bytes)} free at {disk.path}"


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
    sizes = {p.pid: "" if p.bytes is None else f", {bytes_text(p.bytes)}" for p in card.processes}
    holders = [f"{p.name} (pid {p.pid}{sizes[p.pid]})" for p in card.processes]
    held = ", ".join(holders) or "processes that are hidden from here"
    severity: Severity = "error" if 2 * card.free_bytes < card.usable_bytes else "warning"
    why = (
        f"{bytes_text(card.used_bytes)} are held by {held}. Plans are made for a whole card, and "
        f"vLLM's share is one of the whole card, and must be free when it starts."
    )
    pids = " ".join(str(process.pid) for process in card.processes)
    end = f"end them (kill {pids})" if pids else "end them outside of this container"
    return finding(key, severity, what, why, f"{end}, or leave it out by CUDA_VISIBLE_DEVICES")


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
    *(memory, cores, shared_memory, run_disk, temporary_disk),
    _compilers,
    _ray,
    _sandbox,
)
"""All rules, in the order in which `plimsoll doctor` shows their findings."""


_STATES: Mapping[Severity, str] = {"ok": "ok", "warning": "warn", "error": "wrong"}
_COLOURS: Mapping[Severity, str] = {"ok": "green", "warning": "yellow", "error": "red"}


def diagnose(machine: Machine) -> list[Problem]:
    """Return the findings of all rules about a machine, good and bad ones."""
    return list(find(MACHINE_RULES, machine))


def render_findings(findings: Sequence[Problem], terminal: Terminal | None) -> str:
    """Return the findings as a table, which is coloured if there is a terminal."""
    text = Text("\n".join(table(findings)))
    if terminal is None:
        return text.plain
    for severity, state in _STATES.items():
        text.highlight_regex(rf"(?m)^{state}\b", _COLOURS[severity])
    return terminal.draw(text, soft_wrap=True)


def refuse_wrong(findings: Sequence[Problem]) -> None:
    """Raise PlimsollError if any finding is an error."""
    wrong = [finding.key for finding in findings if finding.severity == "error"]
    if wrong:
        raise PlimsollError(f"this machine is not fit for runs: {', '.join(wrong)}.")


def table(findings: Sequence[Problem]) -> list[str]:
    """Return the lines of a table of findings, the last with their counts.

    Lines have at most 80 columns, unless a word is longer.
    """
    names = max(len(finding.key) for finding in findings)
    indent, lines = " " * (names + 8), list[str]()
    for row in findings:
        first = f"{_STATES[row.severity]:<6}{row.key:<{names}}  {row.what}"
        lines += wrap_lines(first, indent).splitlines()
        if row.why:
            lines += wrap_lines(f"{indent}{row.why}", indent).splitlines()
        if row.fix:
            lines += wrap_lines(f"{indent}-> {row.fix}", f"{indent}   ").splitlines()
    count = _counts(findings)
    return [*lines, "", f"{count['wrong']} wrong, {count['warn']} to look at, {count['ok']} ok"]


def report(findings: Sequence[Problem]) -> dict[str, object]:
    """Return the JSON values that --json prints: counts, and all findings."""
    rows = [
        {"name": finding.key, "state": _STATES[finding.severity], "seen": finding.what}
        | {"why": finding.why, "fix": finding.fix}
        for finding in findings
    ]
    return {**_counts(findings), "findings": rows}


def _counts(findings: Sequence[Problem]) -> dict[str, int]:
    by_severity = Counter(finding.severity for finding in findings)
    return {_STATES[severity]: by_severity[severity] for severity in ("error", "warning", "ok")}
