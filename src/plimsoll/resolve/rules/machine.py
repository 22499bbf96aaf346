"""Rules about the local machine: packages that only some runs need, versions, the environment."""

from __future__ import annotations

import importlib.util
import re
import sys
from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Any

from plimsoll.config.problems import Problem, find, invalid, show
from plimsoll.machine.local_host import LocalHost
from plimsoll.machine.versions import PACKAGES, check_version, how_to_install, system_tools
from plimsoll.resolve.engine_rules import (
    PackageNeed,
    RolloutRules,
    TrainerRules,
    all_rules,
    engine_rules,
    other_engines,
    rollout_rules,
    trainers_of,
)
from plimsoll.resolve.model_files import models_by_key
from plimsoll.resolve.rules.rewards import password_in
from plimsoll.resolve.run_spec import RunSpec

_FOR_SHELLS = re.compile(r"[^\w@%+=:,./-]")
"""Characters that shlex.quote quotes, except letters outside of ASCII."""

_ALWAYS = ("torch", "transformers")


def missing_needs(spec: RunSpec[Any]) -> Iterator[Problem]:
    """Yield a problem for each package or tool that the run needs and this machine lacks."""
    yield from missing_for_processes(spec)
    yield from _missing(_of_roles(spec))
    yield from _missing_loggers(spec)
    yield from _unknown_mirror(spec)
    if spec.cluster.address is None:
        yield from _lacking(spec, trainers_of(spec))


def missing_for_processes(spec: RunSpec[Any]) -> Iterator[Problem]:
    """Yield a problem for each missing package or tool of Ray and the sampling engine.

    `plimsoll eval` needs only these; a run needs all of `missing_needs`.
    """
    yield from _missing(_of_processes(spec))
    if spec.cluster.address is None:  # other machines of a cluster are not seen from here
        yield from _lacking(spec, engine_rules(spec))
        yield from _path_for_ray(spec)


def _of_processes(spec: RunSpec[Any]) -> Iterator[PackageNeed]:
    """Yield the packages that Ray and the sampling engine need."""
    if spec.cluster.where == "ray":
        yield PackageNeed("ray", "cluster.where", "ray", "cluster.where: local (one rank)")
    if spec.engines is not None:
        rules, key = rollout_rules(spec.engines), f"rollout.{spec.engines.engine_name}"
        if rules.packages:
            other = other_engines(spec.engines)
            yield PackageNeed(rules.package, key, "given", other, rules.install)


def _of_roles(spec: RunSpec[Any]) -> Iterator[PackageNeed]:
    """Yield the packages that adapters, 8-bit optimizers and quantized models need."""
    for name, role in spec.trained.items():
        if role.adapter is not None:
            yield PackageNeed(
                "peft", f"{name}.adapter.rank", str(role.adapter.rank), f"no {name}.adapter"
            )
        if role.optimizer.kind == "adamw_8bit":
            key = f"{name}.optimizer.kind"
            yield PackageNeed("bitsandbytes", key, "adamw_8bit", f"{key}: adamw")
    for key, model in models_by_key(spec).items():
        if model.quantization == "nf4":
            yield PackageNeed(
                "bitsandbytes", f"{key}.quantization", "nf4", f"{key}.quantization: none"
            )


def _missing(needs: Iterator[PackageNeed]) -> Iterator[Problem]:
    for module, key, value, alternative, install in needs:
        if importlib.util.find_spec(module) is None:
            why = f"The package {module} is not installed."
            fix = f"{install}, or write {alternative}"
            yield invalid(key, value, why, fix, code="package-missing")


def _missing_loggers(spec: RunSpec[Any]) -> Iterator[Problem]:
    """Yield a problem for each logger that is not installed; no extra of Plimsoll has them."""
    for name in spec.run.loggers:
        if importlib.util.find_spec(name) is None:
            why = f"The package {name} is not installed."
            fix = f"`pip install {name}`, or leave {name} out"
            given = show(list(spec.run.loggers))
            yield invalid("run.loggers", given, why, fix, code="package-missing")


def _unknown_mirror(spec: RunSpec[Any]) -> Iterator[Problem]:
    """Yield a problem if fsspec does not know the kind of place, or lacks its package."""
    if spec.run.mirror is None:
        return
    fix = "keep it where fsspec's package looks (~/.aws/credentials, AWS_SECRET_ACCESS_KEY, ...)"
    if problems := [*password_in("run.mirror", spec.run.mirror, fix)]:
        yield from problems
        return
    from fsspec.core import split_protocol
    from fsspec.registry import get_filesystem_class

    given = show(spec.run.mirror)
    try:
        get_filesystem_class(split_protocol(spec.run.mirror)[0] or "file")
    except ImportError as error:
        fix = "`pip install 'plimsoll-rl[s3]'` (or [gcs]), or leave run.mirror out"
        yield invalid("run.mirror", given, f"{error}.", fix, code="package-missing")
    except ValueError as error:
        fix = "write s3://BUCKET/PATH, gs://BUCKET/PATH or another URL that fsspec knows"
        yield invalid("run.mirror", given, f"{error}.", fix)


def _path_for_ray(spec: RunSpec[Any]) -> Iterator[Problem]:
    """Yield a problem if the path of Python has characters that a shell does not take literally.

    Ray starts its processes by a shell and does not quote this path (runtime_env/context.py).
    """
    if spec.cluster.where == "ray" and _FOR_SHELLS.search(sys.executable):
        why = f"Ray cannot start processes of a Python with such a path: {sys.executable}."
        fix = "set Plimsoll up in a directory whose path has no spaces or signs (`make clean` "
        fix += "where it was), or write cluster.where: local (one rank)"
        yield invalid("cluster.where", "ray", why, fix)


def _lacking(
    spec: RunSpec[Any], engines: Iterable[TrainerRules | RolloutRules]
) -> Iterator[Problem]:
    """Yield a problem for each of the engines' needs of system tools that are not here."""
    needs = (need for rules in engines for need in rules.tools(spec))
    for needed, key, value, what, alternative in needs:
        tools = system_tools()
        if missing := [tool for tool in needed if tools[tool] is None]:
            why = f"{what} needs {' and '.join(missing)}, which this machine lacks."
            fix = f"{how_to_install(missing)}, or write {alternative}"
            yield invalid(key, value, why, fix, code="package-missing")


def local_host_rules(spec: RunSpec[Any], host: LocalHost) -> Iterator[Problem]:
    """Yield what cannot work on this machine, is slow or larger here, or was never tried."""
    return find((_versions, _engines, _heap, _bfloat16), spec, host)


def _versions(spec: RunSpec[Any], host: LocalHost) -> Iterator[Problem]:
    """Yield a problem for each package of the run whose installed version fails its check."""
    needed = {need.package for need in chain(_of_processes(spec), _of_roles(spec))} | {*_ALWAYS}
    if any(model.quantization == "nf4" for model in spec.models.values()):
        needed.add("accelerate")
    engines = (package for rules in all_rules(spec) for package in rules.packages)
    for package in (*(package for package in PACKAGES if package.name in needed), *engines):
        version = host.versions.get(package.name)
        problem = None if version is None else check_version(package, version)
        if problem is not None:
            yield problem


def _engines(spec: RunSpec[Any], host: LocalHost) -> Iterator[Problem]:
    """Yield the problems that the rules of the run's engines find on this machine."""
    for rules in all_rules(spec):
        yield from rules.host(spec, host)


def _heap(spec: RunSpec[Any], host: LocalHost) -> Iterator[Problem]:
    """Warn if training on the CPU goes without jemalloc, and may take more than planned."""
    if _computes_on_cpu(spec) and not host.jemalloc:
        what = "this machine's ray package has no core/libjemalloc.so, or a space in its path"
        why = "training on CPU then uses the system's heap, which may hold a quarter more than the "
        why += "plan says (glibc before 2.39 cannot use again all that was freed)"
        fix = "Ray's own wheel for Linux; or set LD_PRELOAD to a jemalloc or tcmalloc of your own"
        yield Problem("no-jemalloc", "warning", what, why, fix)


def _bfloat16(spec: RunSpec[Any], host: LocalHost) -> Iterator[Problem]:
    """Warn of a bfloat16 that the config asks for on a CPU that computes it slowly."""
    if not _computes_on_cpu(spec) or host.bfloat16:
        return
    models = models_by_key(spec).items()
    keys = [f"{key}.dtype" for key, model in models if model.dtype == "bfloat16"]
    if spec.engines is not None and spec.engines.dtype == "bfloat16":
        keys.append("rollout.dtype")
    if keys:
        what = f"{', '.join(keys)}: bfloat16, and this CPU has no instructions for it (AMX, "
        what += "AVX-512 BF16)"
        why = "a step takes six to twelve times as long as in float32 (measured on an AMD EPYC "
        why += "with AVX2 alone)"
        yield Problem(
            "bfloat16-cpu", "warning", what, why, "leave the key out: auto is float32 here"
        )


def _computes_on_cpu(spec: RunSpec[Any]) -> bool:
    """Return whether the run's processes compute on the CPU of this machine."""
    return spec.cluster.device == "cpu" and spec.cluster.address is None
