"""Make the memory plan of a job, for the hardware that its config names or for this machine."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from plimsoll.config.cluster import ClusterConfig
from plimsoll.config.flags import apply_flags, parse_flags, write_flags
from plimsoll.config.load import read_config_text
from plimsoll.config.problems import Problem
from plimsoll.config.yaml_tree import Tree
from plimsoll.errors import ConfigError, DoesNotFit, SettingsConflict
from plimsoll.machine.hardware import (
    Hardware,
    Node,
    find_machine,
    live_machine,
    parse_bytes,
    parse_cluster,
)
from plimsoll.machine.local_host import LocalHost, expands, named_settings, read_local_host
from plimsoll.memory.advise import Advice, advice_text, advice_values, advise, answers_text
from plimsoll.memory.contents.contents import make_job
from plimsoll.memory.contents.overheads import FIXED_SEGMENTS_GAP, Constants, read_constants
from plimsoll.memory.contents.stores import checkpoint_bytes, process_peaks
from plimsoll.memory.levers.trials import flags_of
from plimsoll.memory.plan import (
    make_plan,
    plan_text,
    plan_values,
    problem_text,
    short_text,
    tokens_at_peak,
    verdict_text,
)
from plimsoll.memory.weigh import Ground, Plan
from plimsoll.resolve.engine_rules import known_packages
from plimsoll.resolve.rules.machine import local_host_rules
from plimsoll.resolve.run_spec import RunSpec
from plimsoll.run.directory import RunDirectory
from plimsoll.run.files import nearest_existing
from plimsoll.run.numbers import gigabytes, plural
from plimsoll.run.readings import Footprints, Planned


def plan_job(spec: RunSpec[Any]) -> Plan:
    """Return the plan for `cluster.hardware`, or for `cluster.nodes` machines like this one.

    Raises ConfigError if the hardware, the calibration or the model's shape is unknown.
    """
    return make_plan(spec, _ground(spec, here=spec.cluster.hardware is None))


def advise_job(spec: RunSpec[Any]) -> Advice:
    """Return advice on changes that would make the job fit; raise the errors of `plan_job`."""
    return advise(spec, _ground(spec, here=spec.cluster.hardware is None))


def _ground(spec: RunSpec[Any], *, here: bool) -> Ground:
    """Return the hardware and constants of a plan; `here` adds this machine's disk and state."""
    ground = Ground(hardware_of(spec.cluster), constants_of(spec.cluster))
    if not here:
        return ground
    run = RunDirectory(Path(spec.run.directory))
    free = shutil.disk_usage(nearest_existing(run.path)).free + run.saved_bytes()
    return replace(ground, free_disk=free, host=local_host_of(spec.cluster))


def plan_run(spec: RunSpec[Any]) -> Plan | str:
    """Return the plan of a run that is about to start, or a text that says why there is no plan.

    There is no plan if the model's shape, or the hardware of the joined Ray cluster, is unknown.
    The plan has a problem for each resource that the config's hardware has and this machine lacks.

    Raises ConfigError for unknown hardware or calibration, and SettingsConflict if there is no plan
    and this machine cannot run the config.
    """
    cluster = spec.cluster
    ground = _ground(spec, here=True)
    assert ground.host is not None
    if cluster.address is not None and cluster.hardware is None:
        refuse_conflicts(local_host_rules(spec, ground.host))
        return (
            f"no plan of memory: the hardware of the cluster at {cluster.address} is unknown. Give "
            "cluster.hardware, such as 8xA100-80GB, and cluster.host_memory"
        )
    try:
        plan = make_plan(spec, ground)
    except ConfigError as error:
        refuse_conflicts(local_host_rules(spec, ground.host))
        why, *_ = str(error).splitlines()  # without the list of all names
        return f"no plan of memory: {why}"
    if cluster.hardware is None or cluster.address is not None:
        return plan
    lacking = _lacking(ground.hardware.node, find_machine(), cluster)
    return replace(plan, problems=(*plan.problems, *lacking))


def hardware_of(cluster: ClusterConfig) -> Hardware:
    """Return `cluster.hardware`, or this machine times `cluster.nodes`.

    Raises ConfigError if the hardware is unknown.
    """
    memory = None if cluster.host_memory is None else parse_bytes(cluster.host_memory)
    if cluster.hardware is not None:
        return parse_cluster(cluster.hardware, cluster.nodes, memory)
    node = live_machine()
    return Hardware(replace(node, host_bytes=memory or node.host_bytes), cluster.nodes)


def constants_of(cluster: ClusterConfig) -> Constants:
    """Return the plan's constants from `cluster.calibration`, or else the shipped constants.

    The allocator gap has another value if the environment sets an allocator with fixed segments.
    """
    if cluster.calibration is not None:
        return read_constants(Path(cluster.calibration))
    settings = named_settings()
    if not settings or expands(settings):
        return Constants()
    return Constants().with_measured(
        f"fixed segments: {settings}", allocator_gap=FIXED_SEGMENTS_GAP
    )


def predict_peaks(spec: RunSpec[Any]) -> dict[str, Footprints]:
    """Return the predicted peaks of a run by process and phase.

    They are empty for a model of unknown shape (`plan_run` says why).

    Raises ConfigError if hardware or calibration cannot be read.
    """
    hardware, constants = hardware_of(spec.cluster), constants_of(spec.cluster)
    try:
        return process_peaks(make_job(spec, hardware, constants))
    except ConfigError:
        return {}


def summarize_plan(spec: RunSpec[Any], plan: Plan | str) -> Planned:
    """Return the parts of the plan that a run uses; if there is no plan, only predicted peaks."""
    if isinstance(plan, str):
        return Planned(predicted=predict_peaks(spec))
    return Planned(
        plan_json(plan),
        process_peaks(plan.job),
        fits=plan.verdict != "does not fit",
        tokens_at_peak=tokens_at_peak(plan.job),
        checkpoint_bytes=checkpoint_bytes(plan.job),
    )


def local_host_of(cluster: ClusterConfig) -> LocalHost:
    """Return the state of this machine, without its cards' free bytes if ranks run elsewhere."""
    host = read_local_host(known_packages())
    return host if cluster.address is None else replace(host, free_bytes=())


def refuse_conflicts(problems: Iterable[Problem]) -> None:
    """Raise SettingsConflict with all problems that are conflicts; do nothing if there are none.

    More memory would not solve a conflict.
    """
    if conflicts := [problem_text(problem) for problem in problems if problem.is_conflict]:
        raise SettingsConflict("\n".join(["what the config asks for cannot work", *conflicts]))


def warnings_of(plan: Plan) -> list[str]:
    """Return the texts of the plan's warnings; a run may start in spite of them."""
    return [problem_text(p) for p in plan.problems if p.severity == "warning"]


def require_fit(plan: Plan) -> None:
    """Raise DoesNotFit, with errors and remedies, if the plan does not fit.

    A plan with a guessed model keeps no run from starting.
    """
    is_guess = any(shape.origin == "guessed" for shape in plan.job.shapes.values())
    if plan.verdict == "does not fit" and not is_guess:
        raise DoesNotFit(
            f"the run does not fit\n{verdict_text(plan)}\n"
            "`plimsoll plan --all` shows every item; --force starts the run all the same."
        )


def render_short_plan(plan: Plan, advice: Advice | None = None) -> str:
    """Return a short text of the plan, followed by the advice's answers if there is advice."""
    text = short_text(plan)
    return text if advice is None else f"{text}\n\n{answers_text(advice, plan)}"


def render_whole_plan(plan: Plan, advice: Advice | None = None) -> str:
    """Return a text of all items of the plan and all advice.

    Bars are drawn with Unicode blocks if standard output is a UTF terminal.
    """
    blocks = sys.stdout.isatty() and sys.stdout.encoding.lower().startswith("utf")
    text = plan_text(plan, unicode=blocks)
    return text if advice is None else f"{text}\n\n{advice_text(advice)}"


def apply_answer(path: str, flags: Sequence[str], advice: Advice, number: int) -> str:
    """Return the text of a config, changed by the flags and by an answer of the advice.

    `number` counts from 1. Raises ConfigError if there is no such answer, or if the file's layout
    cannot be edited.
    """
    answers = advice.answers
    if not 0 < number <= len(answers):
        there = f"There are answers 1 to {len(answers)}: --suggest --all shows them"
        raise ConfigError(
            f"--apply {number}: there is no such answer. "
            f"{there if answers else 'Nothing that was tried would do'}."
        )
    changes = flags_of(answers[number - 1].changes)
    return write_flags(read_config_text(path), path, [*parse_flags(flags), *changes])


def fit_values(spec: RunSpec[Any], values: dict[str, object]) -> dict[str, object] | None:
    """Return config values that fit, or None if no change that was tried makes them fit.

    If `values` fit, return them unchanged. Otherwise return them with the first answer of the
    advice that fits; answers that do not affect learning come first. Answers that need other
    machines are not used. `spec` is the spec of `values`.

    Raises the errors of `plan_job`.
    """
    advice = advise_job(spec)
    if advice.fits:
        return values
    fitting = [
        answer.changes
        for answer in advice.answers
        if answer.verdict == "fits" and answer.effect != "machines"
    ]
    return apply_flags(Tree(values, {}), flags_of(fitting[0])).values if fitting else None


def plan_json(plan: Plan, advice: Advice | None = None) -> str:
    """Return a plan, and its advice if given, as JSON text."""
    return json.dumps(plan_values(plan) | advice_values(advice), indent=1) + "\n"


def _lacking(given: Node, live: Node, cluster: ClusterConfig) -> Iterator[Problem]:
    """Yield a problem for each resource that the config's hardware has and this machine lacks."""
    if cluster.device != "cpu" and len(live.cards) < len(given.cards):
        yield _problem(f"{plural(len(given.cards), 'GPU')}, and this machine has {len(live.cards)}")
    for card, found_card in zip(given.cards, live.cards, strict=False):
        if 0 < found_card.usable_bytes < card.usable_bytes:
            yield _problem(
                f"GPUs of {gigabytes(card.usable_bytes)} GB, and this machine's {found_card.name} "
                f"has {gigabytes(found_card.usable_bytes)} GB"
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
