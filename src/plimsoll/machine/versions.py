"""Check what is installed: versions of libraries with known failures, and the system's own tools.

The range of each library is written only in pyproject.toml and read from the installed metadata.
Not every version of a range was tried. The lock files in requirements/ install tested versions.
Each failure names the thread that reports it. The tools that a run needs of the system are
compilers, headers and libraries.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import shutil
import sysconfig
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from typing import TYPE_CHECKING

from plimsoll.config.problems import Problem, Severity, finding

if TYPE_CHECKING:
    from packaging.specifiers import SpecifierSet
    from packaging.version import Version


@dataclass(frozen=True)
class Failure:
    """A known failure of some versions of a library."""

    versions: str
    """A specifier, such as `<4.48`."""
    what: str
    source: str
    """The threads or pages that report it."""


@dataclass(frozen=True)
class Package:
    """A library."""

    name: str
    use: str = ""
    """The sentence that says which runs need the library; "" if all do."""
    beyond: str | None = None
    """A specifier of versions outside of the range with which runs have worked."""
    fatal: tuple[Failure, ...] = ()
    """Failures that stop every run."""
    partial: tuple[Failure, ...] = ()
    """Failures that stop some runs. They are reported only for versions outside of the range and
    `beyond`; for versions inside, the plan and the rules prevent them.
    """


LIGER = "liger-kernel"
PACKAGES: tuple[Package, ...] = (
    Package(
        "torch",
        fatal=(
            Failure(
                "<2.10",
                "It has no torch.nn.attention.varlen, which packed attention is made of.",
                "docs.pytorch.org/docs/2.10/nn.attention.varlen.html",
            ),
        ),
    ),
    Package(
        "transformers",
        beyond=">=5.20,<5.24",
        fatal=(
            Failure(
                "<4.48",
                "Decoder layers call the rotary embedding in another way (4.38 and 4.48 changed "
                "it): runs end with `LlamaRotaryEmbedding.forward() missing 1 required positional "
                "argument: 'position_ids'` or `cannot unpack non-iterable NoneType object`.",
                "InternLM/xtuner#491, huggingface/peft#1459, VectorSpaceLab/OmniGen#212",
            ),
        ),
        partial=(
            Failure(
                ">=5",
                "Loading under ZeRO-3 merges all shards on every rank before it divides them, so "
                "host memory grows by a copy of the model a rank; 4.51 took one shard at a time.",
                "huggingface/transformers#47514, modeling_utils.py of 5.19",
            ),
        ),
    ),
    Package("ray", use="Only cluster.where: ray needs it."),
    Package(
        "peft",
        use="Only adapters need it.",
        fatal=(
            Failure(
                "<0.18.1",
                "It imports HybridCache, which transformers 5 has no more.",
                "vllm-project/vllm#30566",
            ),
        ),
    ),
    Package(
        "bitsandbytes",
        use="Only 4-bit weights need it.",
        partial=(
            Failure(
                "<0.43",
                "4-bit weights can only be stored as bytes, which ZeRO-3 cannot divide: runs end "
                "with `.to is not supported for 4-bit or 8-bit models`.",
                "bitsandbytes-foundation/bitsandbytes#970, huggingface/transformers#29303",
            ),
        ),
    ),
    Package(
        "accelerate",
        use="Only 4-bit weights need it.",
        fatal=(
            Failure(
                "<1.13",
                "4-bit weights do not load through it with transformers 5.",
                "vllm-project/vllm#30566",
            ),
        ),
    ),
    Package(
        LIGER,
        use="Without it norms, gated MLPs and rotary embeddings run as chains of small operations.",
    ),
)
"""The libraries of Plimsoll itself; each engine's are in its folder (`rules.py`, `packages`)."""


def installed_version(name: str) -> str | None:
    """Return a package's version from its metadata, without an import; None if not installed."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def installed_versions(packages: Iterable[Package]) -> dict[str, str | None]:
    """Return the installed version of each package, by its name; None if it is not installed."""
    return {package.name: installed_version(package.name) for package in packages}


@cache
def required(name: str) -> SpecifierSet:
    """Return the range of versions of a library that Plimsoll requires.

    If only extras require the library, the range is that of the extras. If Plimsoll itself is not
    installed, the range has all versions.
    """
    from packaging.requirements import Requirement
    from packaging.specifiers import SpecifierSet

    try:
        lines = map(Requirement, requires("plimsoll-rl") or ())
    except PackageNotFoundError:
        return SpecifierSet()
    requirements = [line for line in lines if line.name == name]
    unconditional = [line for line in requirements if line.marker is None]
    versions = SpecifierSet()
    for line in unconditional or requirements:
        versions &= line.specifier
    return versions


def has_cuda_build() -> bool:
    """Return whether torch is installed with CUDA, without importing it."""
    torch = importlib.util.find_spec("torch")
    if torch is None or torch.origin is None:
        return False
    return Path(torch.origin).with_name("lib").joinpath("libtorch_cuda.so").is_file()


@cache
def cards_have_liger() -> bool:
    """Return whether models on cards use Liger's kernels: whether liger-kernel is installed.

    A machine whose torch has no CUDA can only plan for cards elsewhere. There the package counts as
    installed, as the extra `gpu` brings it.
    """
    return installed_version(LIGER) is not None or not has_cuda_build()


def check_version(package: Package, installed: str | None) -> Problem | None:
    """Return the problem of an installed version; None if Plimsoll takes the version.

    An error stops runs. A warning says that the version is untried or fails in some runs. Local
    parts such as +cu130 do not count.
    """
    judgement, name = _judge(package, installed), package.name
    if judgement is None:
        return None
    fix = f"install {name}{required(name)} (requirements/ has a complete set that works together)"
    severity, why = judgement
    return Problem("package-version", severity, f"{name} {installed} is installed", why, fix)


def package_finding(package: Package, installed: str | None) -> Problem:
    """Return the line of `plimsoll doctor` about a package, whether it is good or not."""
    problem = check_version(package, installed)
    if problem is None:
        return finding(package.name, "ok", installed or "")
    if package.use and installed is None:
        return finding(package.name, "warning", "not installed", package.use, problem.fix)
    return replace(problem, what=installed or "not installed", key=package.name)


def _judge(package: Package, installed: str | None) -> tuple[Severity, str] | None:
    from packaging.version import InvalidVersion, Version

    if installed is None:
        return "error", "It is not installed."
    try:
        parsed = Version(installed)
    except InvalidVersion:
        return "warning", "Its version cannot be read."
    if failure := _first_failure(parsed, package.fatal):
        return "error", f"{failure.what} ({failure.source})"
    tried = [str(required(package.name)), *filter(None, [package.beyond])]
    if any(_matches(parsed, versions) for versions in tried):
        return None
    why = "Plimsoll was not tried with it"
    if failure := _first_failure(parsed, package.partial):
        return "warning", f"{why}. {failure.what} ({failure.source})"
    return "warning", f"{why}, only with {' and '.join(tried)}; no failure is known."


def _first_failure(installed: Version, failures: Iterable[Failure]) -> Failure | None:
    return next((failure for failure in failures if _matches(installed, failure.versions)), None)


def _matches(installed: Version, versions: str) -> bool:
    from packaging.specifiers import SpecifierSet

    return installed in SpecifierSet(versions, prereleases=True)


COMPILERS = ("gcc", "g++", "ninja", "nvcc")
LIBNUMA = "libnuma.so.1"
FOR_TRITON = ("gcc", "Python.h")
"""Triton compiles its launcher at its first use (backends/nvidia/driver.py)."""

DEBIAN = {
    "gcc": "gcc",
    "g++": "g++",
    "ninja": "ninja-build",
    "Python.h": "python3-dev",
    LIBNUMA: "libnuma1",
}
"""Debian's package for each tool. nvcc is missing: Debian's is of an older CUDA than torch's, which
DeepSpeed refuses.
"""


def system_tools() -> dict[str, str | None]:
    """Return the path of each of COMPILERS, Python.h and LIBNUMA; None if it is missing."""
    places = {tool: _find(tool) for tool in COMPILERS}
    return places | {"Python.h": _headers(), LIBNUMA: _library(LIBNUMA)}


def how_to_install(missing: Sequence[str]) -> str:
    """Return a phrase on how to install the missing tools on Debian."""
    packages = [DEBIAN[tool] for tool in missing if tool in DEBIAN]
    steps = [f"apt install {' '.join(packages)}"] if packages else []
    if "nvcc" in missing:
        steps.append("set CUDA_HOME to a CUDA kit of torch's own version")
    return " and ".join(steps)


def own_scripts() -> str:
    """Return the folder with the commands of this Python's packages. PATH may lack it."""
    return sysconfig.get_path("scripts")


def _find(tool: str) -> str | None:
    """Return the path of a tool, or None; the search is that of the library that needs the tool.

    Triton needs gcc (runtime/build.py), and torch needs g++ (_inductor/config.py). nvcc may also be
    in CUDA_HOME or in /usr/local/cuda.
    """
    match tool:
        case "gcc":
            return os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")
        case "g++":
            return shutil.which((os.environ.get("CXX") or "g++").split()[0])
        case "ninja":
            return shutil.which(tool) or shutil.which(tool, path=own_scripts())
    home = os.environ.get("CUDA_HOME", "/usr/local/cuda")
    return shutil.which(tool) or shutil.which(tool, path=f"{home}/bin")


def _headers() -> str | None:
    header = Path(sysconfig.get_path("include"), "Python.h")
    return str(header) if header.is_file() else None


def _library(name: str) -> str | None:
    try:
        ctypes.CDLL(name)
    except OSError:
        return None
    return name
