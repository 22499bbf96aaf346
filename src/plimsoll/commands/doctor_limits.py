"""The limits of a machine, container or user, as `plimsoll doctor` judges them."""

from __future__ import annotations

import os

from plimsoll.commands.doctor_finding import Finding, State
from plimsoll.commands.doctor_machine import Disk
from plimsoll.machine.host import HostMemory
from plimsoll.run.counting import bytes_text

_GIB = 2**30
_LEAST_SHARED = _GIB  # Docker gives 64 MiB; NCCL alone takes some tens of MiB a rank
_RAY_SHARE = 0.3  # of the memory: Ray's object store (ray_constants.py)
_LONGEST_TEMPORARY = 39  # bytes: below it /ray/session_<date>_<time>_<pid>/sockets/plasma_store
_RAY_FULL = 0.05  # free: Ray spills no objects to a disk that is fuller
_LEAST_DISK, _TIGHT_DISK = _GIB, 20 * _GIB
_LEAST_TEMPORARY = 2**26  # Ray's logs; a short run on two ranks writes some MB
_LEAST_FILES = 4096
_LEAST_PROCESSES = 4096  # a run on two ranks has some hundred threads, and more with more cores
_LEAST_LOCKED = _GIB
_OTHER_DIRECTORY = "choose another run.directory"


def cores(usable: int, in_all: int) -> Finding:
    """Those that threads can be on: their number is what cluster.threads is by default."""
    seen = f"{usable:,}"
    if usable < in_all:
        seen += f" of {in_all:,} (affinity, or a cgroup's quota)"
    return Finding("cores", "ok", seen)


def locked_memory(limit: int | None, gpu: bool) -> Finding:
    """ulimit -l."""
    seen = "unlimited" if limit is None else bytes_text(limit)
    if limit is None or limit >= _LEAST_LOCKED or not gpu:
        return Finding("locked memory", "ok", seen)
    why = "NCCL over InfiniBand and offload to NVMe lock more host memory than that."
    fix = "ulimit -l unlimited; in a container, docker run --ulimit memlock=-1"
    return Finding("locked memory", "warn", seen, why, fix)


def address_space(limit: int | None) -> Finding:
    """ulimit -v."""
    if limit is None:
        return Finding("address space", "ok", "unlimited")
    why = "Ray and CUDA reserve far more addresses than they use memory, and then do not start."
    fix = "ulimit -v unlimited; limit memory by a cgroup instead"
    return Finding("address space", "warn", bytes_text(limit), why, fix)


def shared_memory(shared: Disk, host: HostMemory, gpu: bool) -> Finding:
    """/dev/shm, where NCCL's buffers and Ray's object store are."""
    seen = f"{bytes_text(shared.free_bytes)} of {bytes_text(shared.total_bytes)} free"
    size = f"docker run --shm-size={max(1, round(_RAY_SHARE * host.capacity_bytes / _GIB))}g"
    fix = f"{size} (or --ipc=host); delete what is left over in {shared.path}"
    if gpu and shared.free_bytes < _LEAST_SHARED:
        why = "NCCL ends with `No space left on device` or a bus error, and Ray goes to the disk."
        return Finding("shared memory", "wrong", seen, why, fix)
    if shared.free_bytes < _RAY_SHARE * host.free_bytes:
        why = "Ray wants 30 % of the memory here; with less its object store is on the disk, slow."
        return Finding("shared memory", "warn", seen, why, fix)
    return Finding("shared memory", "ok", seen)


def open_files(limit: int) -> Finding:
    """ulimit -n."""
    if limit >= _LEAST_FILES:
        return Finding("open files", "ok", f"{limit:,}")
    why = "Ray holds sockets to every worker and ends with `Too many open files`."
    return Finding("open files", "warn", f"{limit:,}", why, "ulimit -n 65536")


def processes(limit: int | None) -> Finding:
    """ulimit -u, and the cgroup's."""
    seen = "unlimited" if limit is None else f"{limit:,} at most, threads included"
    if limit is None or limit >= _LEAST_PROCESSES:
        return Finding("processes", "ok", seen)
    why = "Ray, torch and vLLM start threads for every core, and end with `Resource temporarily "
    why += "unavailable` where there are too many."
    fix = "ulimit -u unlimited; in a container, docker run --pids-limit=-1"
    return Finding("processes", "warn", seen, why, fix)


def run_disk(disk: Disk) -> Finding:
    """Where runs are written."""
    seen = f"{bytes_text(disk.free_bytes)} free at {disk.path}"
    if not disk.writable:
        why = "Checkpoints, metrics and the model go there."
        return Finding("run disk", "wrong", _closed(disk), why, _OTHER_DIRECTORY)
    if disk.free_bytes >= _TIGHT_DISK:
        return Finding("run disk", "ok", seen)
    state: State = "wrong" if disk.free_bytes < _LEAST_DISK else "warn"
    why = "A checkpoint takes about 14 bytes a parameter: 7 GB for a model of 0.5B."
    return Finding("run disk", state, seen, why, f"make room, or {_OTHER_DIRECTORY}")


def temporary_disk(disk: Disk) -> Finding:
    """Where Ray keeps its sessions and spills objects."""
    seen = f"{bytes_text(disk.free_bytes)} free at {disk.path}"
    if disk.free_bytes < _LEAST_TEMPORARY or not disk.writable:
        seen = seen if disk.writable else f"{disk.path}/ray cannot be written to"
        why = "Ray keeps its logs and sessions there and cannot start."
        return Finding("temporary disk", "wrong", seen, why, "make room, or set TMPDIR")
    if len(os.fsencode(disk.path)) > _LONGEST_TEMPORARY:
        why = "Ray's sockets are below it, and their paths are over the system's 107 bytes."
        fix = f"set TMPDIR to a path of at most {_LONGEST_TEMPORARY} bytes"
        return Finding("temporary disk", "wrong", seen, why, fix)
    if disk.free_bytes < max(_LEAST_DISK, _RAY_FULL * disk.total_bytes):
        why = "Ray puts objects there that memory has no room for, unless it is over 95 % full."
        return Finding("temporary disk", "warn", seen, why, "make room, or set TMPDIR")
    return Finding("temporary disk", "ok", seen)


def cache_disk(disk: Disk) -> Finding:
    """Where packages keep what they compile and download, unless variables of theirs say."""
    if disk.writable and disk.free_bytes >= _LEAST_DISK:
        return Finding("caches", "ok", f"{bytes_text(disk.free_bytes)} free at {disk.path}")
    seen = f"{bytes_text(disk.free_bytes)} free at {disk.path}" if disk.writable else _closed(disk)
    why = "Adam for the CPU, Triton's kernels and models of the hub go there, or beside it."
    fix = "set HOME to a directory that can be written to (docker run -e HOME=/workspace)"
    return Finding("caches", "warn", seen, why, fix)


def _closed(disk: Disk) -> str:
    return f"{disk.path} cannot be written to"
