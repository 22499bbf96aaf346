"""The engine's requirements on a run."""

from __future__ import annotations

from collections.abc import Iterator

from plimsoll.config.problems import Problem
from plimsoll.machine.versions import Package, package_finding
from plimsoll.resolve.engine_rules import Compiled, Installed, RolloutRules

SPEECH = Package("numpy", use="Only rollout.parrot needs it.")


def _doctor(seen: Installed) -> Iterator[Problem]:
    yield package_finding(SPEECH, seen.versions[SPEECH.name])


RULES = RolloutRules(
    title="the parrot",
    where=("local", "ray"),
    package="transformers",
    packages=(SPEECH,),
    doctor=_doctor,
    compiled=(Compiled("the parrot's beak", ("ninja",), ("cpu", "cuda")),),
    shortages=("the seed is all eaten",),
)
