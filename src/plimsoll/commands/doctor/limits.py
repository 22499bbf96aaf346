"""The rules of `plimsoll doctor` about memory, cores and disks."""

from __future__ import annotations

import os
from collections.abc import Iterator

from plimsoll.cluster.ray_access import longest_temporary, private_folder
from plimsoll.commands.doctor.machine import Disk, Machine
from plimsoll.config.problems import Problem, Severity, finding
from plimsoll.run.counting import bytes_text

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
    if host.limit is not None:
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
    disk, severity = machine.runs, _severity(machine.runs)
    why = "A checkpoint takes about 14 bytes a parameter: 7 GB for a model of 0.5B."
    fix = f"make room, or {_OTHER_DIRECTORY}"
    if not disk.writable:
        why, fix = "Checkpoints, metrics and the model go there.", _OTHER_DIRECTORY
    yield finding("run disk", severity, _describe_disk(disk), why, fix)


def _severity(disk: Disk) -> Severity:
    if not disk.writable or disk.free_bytes < _LEAST_DISK:
        return "error"
    return "warning" if disk.free_bytes < _TIGHT_DISK else "ok"


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
