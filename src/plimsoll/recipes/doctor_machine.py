"""What `plimsoll doctor` looks at; `doctor_checks.py` judges it.

torch and Ray are imported in processes of their own, with a time limit: a broken driver or
library can hang or kill whoever imports it, and must not take the doctor along.
"""

from __future__ import annotations

import json
import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from os.path import expanduser
from pathlib import Path

from plimsoll.cluster.address import knock
from plimsoll.errors import PlimsollError
from plimsoll.memory.machine.host import HostMemory, live_host
from plimsoll.memory.machine.nvidia import LiveCard, live_cards, visible_cards
from plimsoll.memory.machine.tools import system_tools
from plimsoll.memory.machine.versions import PACKAGES, installed_version

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
    """torch as a process of its own saw it.

    cuda: the CUDA version that it is built for, None for a CPU build. kernels: such as sm_80 or
    compute_90, of an available CUDA. trouble: why it cannot be imported, or what it warned of.
    """

    imported: bool
    cuda: str | None
    available: bool
    kernels: tuple[str, ...]
    trouble: str


@dataclass(frozen=True)
class Disk:
    """A file system, as seen from `path`."""

    path: str
    total_bytes: int
    free_bytes: int


@dataclass(frozen=True)
class RayView:
    """trouble: why Ray cannot be imported; silence: why nothing answers at `address`; "" if not."""

    trouble: str
    address: str | None
    silence: str


@dataclass(frozen=True)
class Machine:
    """All that was seen.

    versions: of each of memory.versions.PACKAGES, None where not installed. cards: those that
    CUDA_VISIBLE_DEVICES lets through, of cards_in_all; driver_trouble: why nvidia-smi fails.
    locked_bytes: None for no limit. tools: as `system_tools` finds them.
    """

    python: tuple[int, int, int]
    versions: Mapping[str, str | None]
    torch: TorchView
    cards: tuple[LiveCard, ...]
    cards_in_all: int
    driver_trouble: str
    memory: HostMemory
    locked_bytes: int | None
    open_files: int
    shared: Disk
    runs: Disk
    temporary: Disk
    tools: Mapping[str, str | None]
    ray: RayView


def observe(directory: str, address: str | None) -> Machine:
    """Look at this machine; changes nothing.

    directory: where runs are to be written. address: of a Ray cluster that should answer.
    """
    versions = {package.name: installed_version(package.name) for package in PACKAGES}
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
        locked_bytes=_limit(resource.RLIMIT_MEMLOCK),
        open_files=_limit(resource.RLIMIT_NOFILE) or sys.maxsize,
        shared=_disk("/dev/shm"),
        runs=_disk(directory),
        temporary=_disk(_ray_temporary()),
        tools=system_tools(),
        ray=RayView(ray[1], address, _silence(address)),
    )


def _child(script: str) -> tuple[str, str]:
    """What the script printed last, and why it failed ("" if it did not)."""
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
    cuda, available, kernels, said = json.loads(printed)
    return TorchView(True, cuda, available, tuple(kernels), said)


def _cards() -> tuple[tuple[LiveCard, ...], str]:
    try:
        return live_cards(), ""
    except PlimsollError as error:
        return (), str(error)


def _limit(kind: int) -> int | None:
    soft, _ = resource.getrlimit(kind)
    return None if soft == resource.RLIM_INFINITY else soft


def _disk(path: str) -> Disk:
    """Of the nearest directory that exists."""
    whole = Path(expanduser(path)).absolute()
    usage = shutil.disk_usage(next(p for p in (whole, *whole.parents) if p.exists()))
    return Disk(path, usage.total, usage.free)


def _ray_temporary() -> str:
    """Where Ray keeps its sessions (_common/utils.py, get_default_system_temp_dir)."""
    return os.environ.get("RAY_TMPDIR") or os.environ.get("TMPDIR") or "/tmp"


def _silence(address: str | None) -> str:
    try:
        if address is not None:
            knock(address)
    except (OSError, ValueError) as error:
        return str(error)
    return ""
