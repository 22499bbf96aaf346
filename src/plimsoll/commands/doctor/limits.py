"""The rules of `plimsoll doctor` about memory, cores, limits and disks."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator

from plimsoll.cluster.ray_folder import longest_temporary, private_folder
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
_LEAST_FILES = 4096
_LEAST_PROCESSES = 4096  # a run on two ranks has some hundred threads, and more with more cores
_LEAST_LOCKED = _GIB
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


def swap(machine: Machine) -> Iterator[Problem]:
    """Yield a finding about the swap in use."""
    host = machine.memory
    what = f"{bytes_text(host.swap_used_bytes)} of {bytes_text(host.swap_bytes)} used"
    severity: Severity = "warning" if host.swap_used_bytes > _GIB else "ok"
    why = "Memory ran short before: states that are offloaded to swapped memory are very slow."
    fix = "end what holds memory (ps aux --sort=-rss)"
    yield finding("swap", severity, what if host.swap_bytes else "none", why, fix)


def cores(machine: Machine) -> Iterator[Problem]:
    """Yield a finding about the cores, and whether they multiply bfloat16 (for `dtype: auto`)."""
    what = f"{machine.cores:,}"
    if machine.cores < machine.cores_in_all:
        what += f" of {machine.cores_in_all:,} (affinity, or a cgroup's quota)"
    what += ", which multiply bfloat16" if machine.bfloat16 else ", without bfloat16: float32 there"
    yield finding("cores", "ok", what)


def locked_memory(machine: Machine) -> Iterator[Problem]:
    """Check ulimit -l."""
    least = _LEAST_LOCKED if machine.has_gpus else 0
    why = "NCCL over InfiniBand and offload to NVMe lock more host memory than that."
    fix = "ulimit -l unlimited; in a container, docker run --ulimit memlock=-1"
    yield _limit("locked memory", machine.locked_bytes, least, bytes_text, why, fix)


def address_space(machine: Machine) -> Iterator[Problem]:
    """Check ulimit -v."""
    why = "Ray and CUDA reserve far more addresses than they use memory, and then do not start."
    fix = "ulimit -v unlimited; limit memory by a cgroup instead"
    yield _limit("address space", machine.address_bytes, sys.maxsize, bytes_text, why, fix)


def open_files(machine: Machine) -> Iterator[Problem]:
    """Check ulimit -n."""
    why = "Ray holds sockets to every worker and ends with `Too many open files`."
    fix = "ulimit -n 65536"
    yield _limit("open files", machine.open_files, _LEAST_FILES, "{:,}".format, why, fix)


def processes(machine: Machine) -> Iterator[Problem]:
    """Check ulimit -u, and the cgroup's limit."""
    text_of = "{:,} at most, threads included".format
    why = "Ray, torch and vLLM start threads for every core, and end with `Resource temporarily "
    why += "unavailable` where there are too many."
    fix = "ulimit -u unlimited; in a container, docker run --pids-limit=-1"
    yield _limit("processes", machine.processes, _LEAST_PROCESSES, text_of, why, fix)


def _limit(
    key: str, limit: int | None, least: int, text_of: Callable[[int], str], why: str, fix: str
) -> Problem:
    if limit is None:
        return finding(key, "ok", "unlimited")
    return finding(key, "warning" if limit < least else "ok", text_of(limit), why, fix)


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


def cache_disk(machine: Machine) -> Iterator[Problem]:
    """Check the disk for the files that packages compile and download."""
    disk = machine.caches
    enough = disk.writable and disk.free_bytes >= _LEAST_DISK
    why = "Adam for the CPU, Triton's kernels and models of the hub go there, or beside it."
    fix = "set HOME to a directory that can be written to (docker run -e HOME=/workspace)"
    yield finding("caches", "ok" if enough else "warning", _describe_disk(disk), why, fix)


def _describe_disk(disk: Disk, below: str = "") -> str:
    """Return a text: the free bytes of a disk, or that it is not writable.

    `below` is the folder of the disk that must be writable.
    """
    if not disk.writable:
        return f"{disk.path}{below} cannot be written to"
    return f"{bytes_text(disk.free_bytes)} free at {disk.path}"
