"""Observe a machine for `plimsoll doctor`; doctor.py judges it.

torch and Ray are imported in separate processes with a time limit, as a broken driver or library
can hang or kill the process that imports it.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from os.path import expanduser
from pathlib import Path

from plimsoll.cluster.ray_access import check_reachable, private_folder, temporary_directory
from plimsoll.errors import PlimsollError
from plimsoll.machine.host import HostMemory, live_host, multiplies_bfloat16, usable_cores
from plimsoll.machine.nvidia import LiveCard, live_cards, visible_cards
from plimsoll.machine.versions import installed_versions, system_tools
from plimsoll.process.programs import FoundSandbox, find_sandbox
from plimsoll.resolve.engine_rules import known_packages
from plimsoll.run.files import nearest_existing

_PATIENCE = 60.0  # seconds for one import
_SEE_TORCH = """
import json, warnings, torch
with warnings.catch_warnings(record=True) as heard:
    warnings.simplefilter("always")
    available = torch.cuda.is_available()
said = "; ".join(str(warning.message) for warning in heard)
kernels = torch.cuda.get_arch_list() if available else []
print(json.dumps([torch.version.cuda, available, kernels, said]))
"""
_SEE_RAY = "import json, ray; print(json.dumps(True))"


@dataclass(frozen=True)
class TorchView:
    """The state of torch, observed in a separate process."""

    imported: bool
    cuda: str | None
    """CUDA version that torch is built for; None for a CPU build."""
    available: bool
    kernels: tuple[str, ...]
    """Kernels such as sm_80 or compute_90, if CUDA is available."""
    trouble: str
    """Why torch cannot be imported, or torch's warnings."""


@dataclass(frozen=True)
class Disk:
    """A file system, as seen from `path`."""

    path: str
    total_bytes: int
    free_bytes: int
    writable: bool = True
    """Whether files can be created at `path`."""


@dataclass(frozen=True)
class RayView:
    """The state of Ray."""

    trouble: str
    """Why Ray cannot be imported; empty if it can."""
    address: str | None
    silence: str
    """Why `address` does not answer; empty if it answers or is None."""


@dataclass(frozen=True)
class Machine:
    """Everything that `plimsoll doctor` observes about a machine."""

    python: tuple[int, int, int]
    versions: Mapping[str, str | None]
    """Version of each known package; None if it is not installed."""
    torch: TorchView
    cards: tuple[LiveCard, ...]
    """Cards that CUDA_VISIBLE_DEVICES makes visible."""
    cards_in_all: int
    """Number of all cards."""
    driver_trouble: str
    """Why the driver fails; empty if it works."""
    memory: HostMemory
    cores: int
    cores_in_all: int
    bfloat16: bool
    shared: Disk
    runs: Disk
    temporary: Disk
    tools: Mapping[str, str | None]
    """The result of `system_tools`."""
    ray: RayView
    sandbox: FoundSandbox
    """The sandbox for programs of a policy."""

    @property
    def has_gpus(self) -> bool:
        """Whether the machine has GPUs, even if none is visible or works."""
        return self.cards_in_all > 0 or bool(self.driver_trouble)


def observe(directory: str, address: str | None) -> Machine:
    """Return an observation of this machine.

    `directory` is where runs would be written. `address` is a Ray cluster's, or None.
    """
    versions = installed_versions(known_packages())
    with ThreadPoolExecutor() as pool:
        torch, ray = pool.map(_child, (_SEE_TORCH, _SEE_RAY))
    cards, driver_trouble = _cards()
    return Machine(
        python=sys.version_info[:3],
        versions=versions,
        torch=_torch_view(*torch),
        cards=visible_cards(cards, os.environ.get("CUDA_VISIBLE_DEVICES")),
        cards_in_all=len(cards),
        driver_trouble=driver_trouble,
        memory=live_host(),
        cores=usable_cores(),
        cores_in_all=os.cpu_count() or 1,
        bfloat16=multiplies_bfloat16(),
        shared=_disk("/dev/shm"),
        runs=_disk(directory),
        temporary=_ray_temporary(),
        tools=system_tools(),
        ray=RayView(ray[1], address, _silence(address)),
        sandbox=find_sandbox(),
    )


def _child(script: str) -> tuple[str, str]:
    """Run a script in a new process; return its last line, and why it failed ("" if it did not)."""
    try:
        done = subprocess.run(
            [sys.executable, "-c", script], capture_output=True, text=True, timeout=_PATIENCE
        )
    except subprocess.TimeoutExpired:
        return "", f"the import took more than {_PATIENCE:.0f} seconds"
    if done.returncode < 0:
        return "", f"the import was ended by signal {-done.returncode}"
    if done.returncode:
        return "", (done.stderr.strip().splitlines() or ["no message"])[-1]
    return done.stdout.splitlines()[-1], ""


def _torch_view(printed: str, trouble: str) -> TorchView:
    if trouble:
        return TorchView(False, None, False, (), trouble)
    cuda, available, kernels, warned = json.loads(printed)
    return TorchView(True, cuda, available, tuple(kernels), warned)


def _cards() -> tuple[tuple[LiveCard, ...], str]:
    try:
        return live_cards(), ""
    except PlimsollError as error:
        return (), str(error)


def _disk(path: str) -> Disk:
    """Return the file system of `path`, or of its nearest parent that exists."""
    there = nearest_existing(Path(expanduser(path)))
    usage = shutil.disk_usage(there)
    return Disk(path, usage.total, usage.free, os.access(there, os.W_OK | os.X_OK))


def _ray_temporary() -> Disk:
    """Return the disk on which Ray keeps its sessions.

    `writable` says whether the user's folder for Ray there is writable. It may belong to another
    user.
    """
    disk = _disk(temporary_directory())
    return replace(disk, writable=_disk(str(private_folder())).writable)


def _silence(address: str | None) -> str:
    try:
        if address is not None:
            check_reachable(address)
    except (OSError, ValueError) as error:
        return str(error)
    return ""
