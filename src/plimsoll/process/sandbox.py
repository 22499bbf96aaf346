"""A sandbox by bubblewrap, https://github.com/containers/bubblewrap: what a program in it can see.

The program sees `/usr`, the system's libraries and this interpreter with its packages, all of them
read-only; an empty folder `/tmp` of its own, in memory; and nothing else: no other file, process,
network or environment variable.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Literal

Sandbox = Literal["bwrap", "none"]
"""How a program is kept from the rest of the machine: by bubblewrap, or not at all."""

_FOLDER = "/tmp"
_FOLDER_BYTES = 64 * 2**20
_HOUSE = Path(__file__).parents[1]
_SYSTEM = ("/usr", "/lib", "/lib32", "/lib64", "/libx32", "/bin")
_DEVICES = ("/dev/null", "/dev/zero", "/dev/random", "/dev/urandom")


def sandboxed_python(sandbox: Sandbox) -> tuple[str, ...]:
    """Return the command that starts this Python in the sandbox.

    Raises FileNotFoundError if bubblewrap is not installed.
    """
    # Without -S what *.pth files do would take its time at each start.
    python = (os.path.realpath(sys.executable), "-S", "-B", "-P")
    if sandbox == "none":
        return python
    bwrap = shutil.which("bwrap")
    if bwrap is None:
        raise FileNotFoundError("bwrap")
    read_only = dict.fromkeys((sys.base_prefix, *_packages(), str(_HOUSE)))
    return (
        *(bwrap, "--unshare-all", "--die-with-parent", "--new-session"),
        *_folder_words(bwrap),  # first: packages may lie within
        *(word for path in _SYSTEM for word in ("--ro-bind-try", path, path)),
        *(word for path in read_only for word in ("--ro-bind", path, path)),
        *(word for path in _DEVICES for word in ("--dev-bind", path, path)),
        *("--remount-ro", "/", "--chdir", _FOLDER, "--", *python),
    )


@cache
def _folder_words(bwrap: str) -> Sequence[str]:
    """Return the options for the folder; before 0.7 bubblewrap cannot bound a writable one."""
    help_ = subprocess.run([bwrap, "--help"], capture_output=True, text=True).stdout
    sized = ("--size", str(_FOLDER_BYTES), "--tmpfs", _FOLDER)
    return sized if "--size" in help_ else ("--dir", _FOLDER)


def sandbox_environment() -> Mapping[str, str]:
    """Return the environment variables of a program in the sandbox: none of this process's."""
    return {
        "PATH": "/usr/bin:/bin",
        "LANG": "C.UTF-8",
        "HOME": _FOLDER,
        "PYTHONPATH": os.pathsep.join((str(_HOUSE.parent), *_packages())),
        "PYTHONHASHSEED": "0",
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
    }


def _packages() -> Sequence[str]:
    """Return the folders that installed packages are in."""
    return [path for path in sys.path if path.endswith("-packages") and Path(path).is_dir()]
