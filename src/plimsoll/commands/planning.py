"""The plan of a job: on the hardware that its config names, or on what is here."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from plimsoll.config.cluster import ClusterConfig
from plimsoll.config.flags import apply_flags, parse_flags
from plimsoll.config.load import read_config_text
from plimsoll.config.problems import Problem
from plimsoll.config.yaml_edit import write_flags
from plimsoll.config.yaml_tree import Tree
from plimsoll.errors import ConfigError, DoesNotFit, SettingsConflict
from plimsoll.machine.allocator import expands, named_settings
from plimsoll.machine.hardware import (
    Hardware,
    Node,
    find_machine,
    live_machine,
    parse_bytes,
    parse_cluster,
)
from plimsoll.machine.local_host import LocalHost, read_local_host
from plimsoll.memory.advise.advise import Advice, advise
from plimsoll.memory.advise.shown import advice_text, advice_values
from plimsoll.memory.advise.speed import tokens_at_peak
from plimsoll.memory.advise.table import answers_text
from plimsoll.memory.contents.contents import make_job
from plimsoll.memory.contents.overheads import FIXED_SEGMENTS_GAP, Constants, read_constants
from plimsoll.memory.contents.process_peaks import process_peaks
from plimsoll.memory.plan.as_json import plan_values
from plimsoll.memory.plan.as_text import plan_text, problem_text, short_text, verdict_text
from plimsoll.memory.plan.plan import Ground, Plan, make_plan
from plimsoll.memory.plan.svg import draw_svg
from plimsoll.memory.remedies.changes import flags_of
from plimsoll.run.counting import counted, gigabytes
from plimsoll.run.directory import RunDirectory
from plimsoll.run.readings import Footprints, Planned
from plimsoll.spec.rules.machine import local_host_rules
from plimsoll.spec.run_spec import RunSpec

if TYPE_CHECKING:
    from plimsoll.commands.trace_models import TracedRole

_NONE: Mapping[str, TracedRole] = MappingProxyType({})


def plan_job(spec: RunSpec[Any]) -> Plan:
    """The plan on `cluster.hardware`, or on `cluster.nodes` machines like this one.

    Raises ConfigError for hardware, a calibration or a model's shape that is not known.
    """
    return make_plan(spec, _ground(spec))


def advise_job(spec: RunSpec[Any]) -> Advice:
    """What would make it fit there, or faster. Raises as `plan_job`."""
    return advise(spec, _ground(spec))


def _ground(spec: RunSpec[Any]) -> Ground:
    """The machines that the config names; or this one, with its free disk and surroundings."""
    cluster = spec.cluster
    ground = Ground(hardware_of(cluster), constants_of(cluster))
    return ground if cluster.hardware is not None else _at_hand(spec, ground)


def _at_hand(spec: RunSpec[Any], ground: Ground) -> Ground:
    """With what a run would meet here."""
    free_disk = _free_disk(RunDirectory(Path(spec.run.directory)))
    return replace(ground, free_disk=free_disk, host=local_host_of(spec.cluster))


def plan_run(spec: RunSpec[Any]) -> Plan | str:
    """The plan of a run that is about to start, held against this machine; or why there is none:
    the model's shape is not known, or the hardware of the Ray cluster that it joins.

    Raises ConfigError for hardware or a calibration that is not known, and SettingsConflict where
    there is no plan and the machine cannot do what the config asks for.
    """
    cluster = spec.cluster
    ground = _at_hand(spec, Ground(hardware_of(cluster), constants_of(cluster)))
    assert ground.host is not None
    if cluster.address is not None and cluster.hardware is None:
        refuse_conflicts(local_host_rules(spec, ground.host))
        return (
            f"no plan of memory: what the cluster at {cluster.address} has is not said. Give "
            "cluster.hardware, such as 8xA100-80GB, and cluster.host_memory"
        )
    try:
        plan = make_plan(spec, ground)
    except ConfigError as error:
        refuse_conflicts(local_host_rules(spec, ground.host))
        why, *_ = str(error).splitlines()  # without all names that there are
        return f"no plan of memory: {why}"
    if cluster.hardware is None or cluster.address is not None:
        return plan
    lacking = _lacking(ground.hardware.nodes[0], find_machine(), cluster)
    return replace(plan, problems=(*plan.problems, *lacking))


def hardware_of(cluster: ClusterConfig) -> Hardware:
    """What a plan is for. Raises ConfigError for what is not known."""
    memory = None if cluster.host_memory is None else parse_bytes(cluster.host_memory)
    if cluster.hardware is not None:
        return parse_cluster(cluster.hardware, cluster.nodes, memory)
    node = live_machine()
    return Hardware((replace(node, host_bytes=memory or node.host_bytes),) * cluster.nodes)


def constants_of(cluster: ClusterConfig) -> Constants:
    """Return what the plan reckons with: the constants of `cluster.calibration`, or the shipped
    ones, with the gap of fixed segments if the user's environment chooses those."""
    if cluster.calibration is not None:
        return read_constants(Path(cluster.calibration))
    settings = named_settings()
    if not settings or expands(settings):
        return Constants()
    return Constants().calibrated(f"fixed segments: {settings}", allocator_gap=FIXED_SEGMENTS_GAP)


def predicted_peaks(spec: RunSpec[Any]) -> dict[str, Footprints]:
    """What each process of a run should hold at its fullest, by process and phase; nothing for a
    model whose shape is not known (`plan_run` says why).

    Raises ConfigError for hardware or a calibration that cannot be read.
    """
    hardware, constants = hardware_of(spec.cluster), constants_of(spec.cluster)
    try:
        return process_peaks(make_job(spec, hardware, constants))
    except ConfigError:
        return {}


def planned(spec: RunSpec[Any], plan: Plan | str) -> Planned:
    """What a run needs of its plan; without one, at least what its processes should hold."""
    if isinstance(plan, str):
        return Planned(predicted=predicted_peaks(spec))
    return Planned(
        (plan_json(plan), plan_svg(plan, spec.job.name)),
        process_peaks(plan.job),
        fits=plan.verdict != "does not fit",
        tokens_at_peak=tokens_at_peak(plan.job),
    )


def local_host_of(cluster: ClusterConfig) -> LocalHost:
    """This machine's; what is free on its cards only where the ranks will be here."""
    host = read_local_host()
    return host if cluster.address is None else replace(host, free_bytes=())


def refuse_conflicts(problems: Iterable[Problem]) -> None:
    """Raises SettingsConflict (exit code 4) with every problem that no room would mend."""
    if found := [problem_text(problem) for problem in problems if problem.is_conflict]:
        raise SettingsConflict("\n".join(["what the config asks for cannot work", *found]))


def warnings_of(plan: Plan) -> list[str]:
    """What a run may start with all the same, for a person to read."""
    return [problem_text(p) for p in plan.problems if p.severity == "warning"]


def require_fit(plan: Plan) -> None:
    """Raises DoesNotFit (exit code 3) with what breaks the plan, and the way out."""
    if plan.verdict == "does not fit":
        raise DoesNotFit(
            f"the run does not fit\n{verdict_text(plan)}\n"
            "`plimsoll plan --all` shows every item; --force starts the run all the same."
        )


def shown_plan(
    plan: Plan, advice: Advice | None = None, traced: Mapping[str, TracedRole] = _NONE
) -> str:
    """The plan in short, with what was traced, and the answers beside it, as text."""
    parts = [short_text(plan)]
    if traced:
        parts.append(_trace_table(traced))
    if advice is not None:
        parts.append(answers_text(advice, plan))
    return "\n\n".join(parts)


def whole_plan(
    plan: Plan, advice: Advice | None = None, traced: Mapping[str, TracedRole] = _NONE
) -> str:
    """Every item of the plan, what was traced, and all advice, as text; drawn with blocks where
    standard output is a terminal that has them."""
    blocks = sys.stdout.isatty() and sys.stdout.encoding.lower().startswith("utf")
    parts = [plan_text(plan, unicode=blocks)]
    if traced:
        parts.append(_trace_table(traced))
    if advice is not None:
        parts.append(advice_text(advice))
    return "\n\n".join(parts)


def applied(path: str, flags: Sequence[str], advice: Advice, number: int) -> str:
    """The text of a config with an answer in it, and the flags that it was planned with.

    number: the answer's. Raises ConfigError for one that there is not, and for a file whose layout
    cannot be edited.
    """
    answers = advice.numbered
    if not 0 < number <= len(answers):
        there = f"There are answers 1 to {len(answers)}: --suggest --all shows them"
        raise ConfigError(
            f"--apply {number}: there is no such answer. "
            f"{there if answers else 'Nothing that was tried would do'}."
        )
    made = flags_of(answers[number - 1].changes)
    return write_flags(read_config_text(path), path, [*parse_flags(flags), *made])


def fitted(spec: RunSpec[Any], values: dict[str, object]) -> dict[str, object] | None:
    """The values of a config, nested as they are written, with the least change with which it fits
    on its machines (`cluster.hardware`, or what is here): in what is learned first, as answers are
    in order. The same values where it fits; None where nothing that was tried does.

    spec: of these values. Raises as `plan_job`.
    """
    if plan_job(spec).verdict == "fits":  # what would be faster is not looked for
        return values
    answer = next((one for one in advise_job(spec).answers if one.verdict == "fits"), None)
    return (
        None if answer is None else apply_flags(Tree(values, {}), flags_of(answer.changes)).values
    )


def _trace_table(traced: Mapping[str, TracedRole]) -> str:
    """Bytes of one micro-batch on fake tensors, beside those of the formulas."""
    rows = [
        f"  {role:<10} {one.work.tokens:>8,} {gigabytes(one.traced.activations):>12} "
        f"{gigabytes(one.predicted_activations):>12} {one.error:>+8.1%}"
        for role, one in traced.items()
    ]
    head = f"  {'role':<10} {'tokens':>8} {'traced GB':>12} {'formula GB':>12} {'error':>8}"
    return "\n".join(["activations of one micro-batch, traced on fake tensors", head, *rows])


def plan_json(
    plan: Plan, advice: Advice | None = None, traced: Mapping[str, TracedRole] = _NONE
) -> str:
    """The plan, with what was advised and traced, as JSON text."""
    values = plan_values(plan) | advice_values(advice)
    if traced:
        values["traced"] = [
            {
                "role": role,
                "tokens": one.work.tokens,
                "activation_bytes": one.traced.activations,
                "gradient_bytes": one.traced.gradients,
                "predicted_activation_bytes": one.predicted_activations,
            }
            for role, one in traced.items()
        ]
    return json.dumps(values, indent=1) + "\n"


def plan_svg(plan: Plan, title: str) -> str:
    """The plan as a picture."""
    return draw_svg(f"{title}: {plan.verdict}", plan.stores)


def _free_disk(run: RunDirectory) -> int:
    """Where the run is or will be. What a run that is there has saved counts as free: it is among
    what a run that goes on keeps, or replaces."""
    absolute = run.path.absolute()
    existing = next(path for path in (absolute, *absolute.parents) if path.exists())
    return shutil.disk_usage(existing).free + run.saved_bytes()


def _lacking(given: Node, live: Node, cluster: ClusterConfig) -> Iterator[Problem]:
    """What the config's hardware has and this machine has not."""
    if cluster.device != "cpu" and len(live.cards) < len(given.cards):
        yield _problem(
            f"{counted(len(given.cards), 'GPU')}, and this machine has {len(live.cards)}"
        )
    for wanted, found in zip(given.cards, live.cards, strict=False):
        if 0 < found.usable_bytes < wanted.usable_bytes:
            yield _problem(
                f"GPUs of {gigabytes(wanted.usable_bytes)} GB, and this machine's {found.name} "
                f"has {gigabytes(found.usable_bytes)} GB"
            )
            break
    if given.host_bytes and live.host_bytes and live.host_bytes < given.host_bytes:
        yield _problem(
            f"{gigabytes(given.host_bytes)} GB of host memory, and this machine has "
            f"{gigabytes(live.host_bytes)} GB"
        )


def _problem(what: str) -> Problem:
    return Problem(
        "less-than-planned",
        "error",
        f"the config plans for {what}",
        "cluster.hardware and cluster.host_memory say what the run is planned for, and the run "
        "would start here",
        "leave cluster.hardware and cluster.host_memory out, to plan for the machine at hand",
    )
