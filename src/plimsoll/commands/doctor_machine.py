"""What `plimsoll doctor` looks at; `doctor_checks.py` and `doctor_limits.py` judge it.

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
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from importlib.metadata import distributions
from os.path import expanduser
from pathlib import Path

from plimsoll.cluster.address import check_reachable
from plimsoll.errors import PlimsollError
from plimsoll.interop.verifiers.venv import VerifiersInstall, look, venv_directory
from plimsoll.machine.allocator import named_settings
from plimsoll.machine.cgroup import process_limit
from plimsoll.machine.cpu import multiplies_bfloat16
from plimsoll.machine.host import HostMemory, live_host, usable_cores
from plimsoll.machine.nvidia import LiveCard, live_cards, visible_cards
from plimsoll.machine.tools import system_tools
from plimsoll.machine.versions import PACKAGES, installed_version
from plimsoll.process.programs import sandbox_trouble

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
    """A file system, as seen from `path`. writable: whether files can be made there."""

    path: str
    total_bytes: int
    free_bytes: int
    writable: bool = True


@dataclass(frozen=True)
class RayView:
    """trouble: why Ray cannot be imported; silence: why nothing answers at `address`; "" if not."""

    trouble: str
    address: str | None
    silence: str


@dataclass(frozen=True)
class Shadowed:
    """An installed package that a folder of PYTHONPATH has, too, and that is imported from there.
    version, installed: those of the two; None if they are not known."""

    path: str
    version: str | None = None
    installed: str | None = None

    @property
    def differs(self) -> bool:
        """Whether another version is imported than the one that is installed."""
        return None not in (self.version, self.installed) and self.version != self.installed


@dataclass(frozen=True)
class Machine:
    """All that was seen.

    versions: of each of `versions.PACKAGES`, None where not installed. cards: those that
    CUDA_VISIBLE_DEVICES lets through, of cards_in_all; driver_trouble: why the driver fails.
    locked_bytes, address_bytes, processes: None for no limit. caches: where packages keep what they
    compile and download. allocator: as `named_settings` reads it. tools: as `system_tools` finds
    them. sandbox_trouble: why programs of a policy cannot be run in it, "" if they can. verifiers:
    its virtual environment.
    """

    python: tuple[int, int, int]
    versions: Mapping[str, str | None]
    shadowed: tuple[Shadowed, ...]
    torch: TorchView
    cards: tuple[LiveCard, ...]
    cards_in_all: int
    driver_trouble: str
    memory: HostMemory
    cores: int
    cores_in_all: int
    bfloat16: bool
    locked_bytes: int | None
    address_bytes: int | None
    open_files: int
    processes: int | None
    shared: Disk
    runs: Disk
    temporary: Disk
    caches: Disk
    allocator: str
    tools: Mapping[str, str | None]
    ray: RayView
    sandbox_trouble: str
    verifiers: VerifiersInstall

    @property
    def has_gpus(self) -> bool:
        """Whether there are any, though none may be visible or work."""
        return self.cards_in_all > 0 or bool(self.driver_trouble)


def observe(directory: str, address: str | None) -> Machine:
    """Look at this machine; changes nothing.

    directory: where runs are to be written. address: of a Ray cluster that should answer.
    """
    versions = {package.name: installed_version(package.name) for package in PACKAGES}
    with ThreadPoolExecutor() as pool:
        verifiers = pool.submit(look, venv_directory())
        torch, ray = pool.map(_child, (_SEE_TORCH, _SEE_RAY))
    cards, driver_trouble = _cards()
    return Machine(
        python=sys.version_info[:3],
        versions=versions,
        shadowed=tuple(_shadowed()),
        torch=_torch_view(*torch),
        cards=visible_cards(cards, os.environ.get("CUDA_VISIBLE_DEVICES")),
        cards_in_all=len(cards),
        driver_trouble=driver_trouble,
        memory=live_host(),
        cores=usable_cores(),
        cores_in_all=os.cpu_count() or 1,
        bfloat16=multiplies_bfloat16(),
        locked_bytes=_limit(resource.RLIMIT_MEMLOCK),
        address_bytes=_limit(resource.RLIMIT_AS),
        open_files=_limit(resource.RLIMIT_NOFILE) or sys.maxsize,
        processes=_most_processes(),
        shared=_disk("/dev/shm"),
        runs=_disk(directory),
        temporary=_ray_temporary(),
        caches=_disk(os.environ.get("XDG_CACHE_HOME") or "~/.cache"),
        allocator=named_settings(),
        tools=system_tools(),
        ray=RayView(ray[1], address, _silence(address)),
        sandbox_trouble=sandbox_trouble(),
        verifiers=verifiers.result(),
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


def _shadowed() -> Iterator[Shadowed]:
    first = [folder for folder in os.environ.get("PYTHONPATH", "").split(os.pathsep) if folder]
    resolved = {Path(folder).resolve() for folder in first}
    later = [path for path in map(Path, sys.path) if path.resolve() not in resolved]
    for folder in first:
        for package in sorted(Path(folder).resolve().glob("*/__init__.py")):
            name = package.parent.name
            installed = next((path for path in later if (path / name).is_dir()), None)
            if installed is not None:
                versions = _version_in(folder, name), _version_in(str(installed), name)
                yield Shadowed(f"{folder}/{name}", *versions)


def _version_in(folder: str, name: str) -> str | None:
    """The version of a package in a folder; None if the folder does not tell it."""
    return next((found.version for found in distributions(path=[folder], name=name)), None)


def _cards() -> tuple[tuple[LiveCard, ...], str]:
    try:
        return live_cards(), ""
    except PlimsollError as error:
        return (), str(error)


def _limit(kind: int) -> int | None:
    soft, _ = resource.getrlimit(kind)
    return None if soft == resource.RLIM_INFINITY else soft


def _most_processes() -> int | None:
    """Threads count, too."""
    limits = (_limit(resource.RLIMIT_NPROC), process_limit())
    return min((limit for limit in limits if limit is not None), default=None)


def _disk(path: str) -> Disk:
    """Of the nearest directory that exists."""
    whole = Path(expanduser(path)).absolute()
    there = next(p for p in (whole, *whole.parents) if p.exists())
    usage = shutil.disk_usage(there)
    return Disk(path, usage.total, usage.free, os.access(there, os.W_OK | os.X_OK))


def _ray_temporary() -> Disk:
    """Where Ray keeps its sessions (_common/utils.py, get_default_system_temp_dir): in its folder
    `ray`, which may be another user's."""
    disk = _disk(os.environ.get("RAY_TMPDIR") or os.environ.get("TMPDIR") or "/tmp")
    return replace(disk, writable=_disk(f"{disk.path}/ray").writable)


def _silence(address: str | None) -> str:
    try:
        if address is not None:
            check_reachable(address)
    except (OSError, ValueError) as error:
        return str(error)
    return ""
