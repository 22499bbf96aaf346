"""The lock files pin exactly one version of each package that pyproject.toml asks for."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).parents[3]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
BY_ITSELF = "torch"
"""It is installed before the rest, for the machine (requirements/lock.sh)."""


def pins(name: str) -> dict[str, Version]:
    """The versions of a lock file, in which no package comes twice."""
    found: dict[str, Version] = {}
    for line in (ROOT / "requirements" / name).read_text().splitlines():
        if line and line[0] not in "#-":
            one = Requirement(line)
            [pin] = one.specifier
            assert pin.operator == "==" and canonicalize_name(one.name) not in found, line
            found[canonicalize_name(one.name)] = Version(pin.version)
    return found


def asked(*extras: str) -> Iterator[Requirement]:
    """Return what the project asks for, with these extras and those that they name."""
    texts = [*PROJECT["dependencies"]]
    texts += [text for extra in extras for text in PROJECT["optional-dependencies"][extra]]
    for one in map(Requirement, texts):
        if canonicalize_name(one.name) == PROJECT["name"]:
            yield from asked(*one.extras)
        elif one.marker is None or one.marker.evaluate():
            yield one


@pytest.mark.parametrize(
    ("name", "extras"), [("cpu.txt", ("cpu", "vllm-cpu", "dev")), ("gpu.txt", ("gpu", "dev"))]
)
def test_each_package_that_is_asked_for_has_a_version_that_is_allowed(
    name: str, extras: tuple[str, ...]
) -> None:
    found = pins(name)
    wanted = [one for one in asked(*extras) if one.name != BY_ITSELF]
    assert len(wanted) > 20
    for one in wanted:
        version = found[canonicalize_name(one.name)]
        assert one.specifier.contains(version, prereleases=True), f"{one}: {version}"
