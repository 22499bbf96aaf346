"""The plan of a job on the hardware that its config names, or on this machine."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

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
    known_card,
    live_machine,
    parse_bytes,
    parse_cluster,
)
from plimsoll.machine.local_host import LocalHost, read_local_host
from plimsoll.memory.advise import Advice, advice_text, advice_values, advise, answers_text
from plimsoll.memory.contents.contents import PlannedJob, make_job
from plimsoll.memory.contents.overheads import FIXED_SEGMENTS_GAP, Constants, read_constants
from plimsoll.memory.contents.process_peaks import process_peaks
from plimsoll.memory.levers.changes import flags_of
from plimsoll.memory.plan import (
    make_plan,
    plan_text,
    plan_values,
    problem_text,
    short_text,
    verdict_text,
)
from plimsoll.memory.weigh import Ground, Plan
from plimsoll.run.counting import gigabytes, plural
from plimsoll.run.directory import RunDirectory
from plimsoll.run.readings import Footprints, Planned
from plimsoll.spec.engine_rules import known_packages
from plimsoll.spec.rules.machine import local_host_rules
from plimsoll.spec.run_spec import RunSpec


def plan_job(spec: RunSpec[Any]) -> Plan:
    """Return the plan on `cluster.hardware`, or on `cluster.nodes` machines like this one.

    Raises ConfigError if hardware, calibration or the model's shape is unknown.
    """
    return make_plan(spec, _ground(spec))


def advise_job(spec: RunSpec[Any]) -> Advice:
    """Return what would make the job fit; raise as `plan_job`."""
    return advise(spec, _ground(spec))


def _ground(spec: RunSpec[Any]) -> Ground:
    """Return the machines that the config names, or this one with its disk and surroundings."""
    cluster = spec.cluster
    ground = Ground(hardware_of(cluster), constants_of(cluster))
    return ground if cluster.hardware is not None else _at_hand(spec, ground)


def _at_hand(spec: RunSpec[Any], ground: Ground) -> Ground:
    """Return the ground with what a run would find on this machine."""
    free_disk = _free_disk(RunDirectory(Path(spec.run.directory)))
    return replace(ground, free_disk=free_disk, host=local_host_of(spec.cluster))


def plan_run(spec: RunSpec[Any]) -> Plan | str:
    """Return the plan of a run that is about to start, checked against this machine.

    If the model's shape or the hardware of the joined Ray cluster is unknown, return why there is
    no plan.

    Raises ConfigError for unknown hardware or calibration, and SettingsConflict if there is no plan
    and the machine cannot do what the config asks for.
    """
    cluster = spec.cluster
    ground = _at_hand(spec, Ground(hardware_of(cluster), constants_of(cluster)))
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
    lacking = _lacking(ground.hardware.nodes[0], find_machine(), cluster)
    return replace(plan, problems=(*plan.problems, *lacking))


def hardware_of(cluster: ClusterConfig) -> Hardware:
    """Return the hardware that a plan is for, or raise ConfigError if it is unknown."""
    memory = None if cluster.host_memory is None else parse_bytes(cluster.host_memory)
    if cluster.hardware is not None:
        return parse_cluster(cluster.hardware, cluster.nodes, memory)
    node = live_machine()
    return Hardware((replace(node, host_bytes=memory or node.host_bytes),) * cluster.nodes)


def constants_of(cluster: ClusterConfig) -> Constants:
    """Return the constants of `cluster.calibration`, or those of the environment."""
    if cluster.calibration is not None:
        return read_constants(Path(cluster.calibration))
    settings = named_settings()
    if not settings or expands(settings):
        return Constants()
    return Constants().with_measured(
        f"fixed segments: {settings}", allocator_gap=FIXED_SEGMENTS_GAP
    )


def predict_peaks(spec: RunSpec[Any]) -> dict[str, Footprints]:
    """Return the peak of each process of a run, by process and phase.

    It is empty for a model of unknown shape (`plan_run` says why).

    Raises ConfigError if hardware or calibration cannot be read.
    """
    hardware, constants = hardware_of(spec.cluster), constants_of(spec.cluster)
    try:
        return process_peaks(make_job(spec, hardware, constants))
    except ConfigError:
        return {}


def summarize_plan(spec: RunSpec[Any], plan: Plan | str) -> Planned:
    """Return what a run needs of its plan; without a plan, at least the predicted peaks."""
    if isinstance(plan, str):
        return Planned(predicted=predict_peaks(spec))
    return Planned(
        plan_json(plan),
        process_peaks(plan.job),
        fits=plan.verdict != "does not fit",
        tokens_at_peak=tokens_at_peak(plan.job),
    )


def local_host_of(cluster: ClusterConfig) -> LocalHost:
    """Return this machine, with the free bytes of its cards only if ranks run here."""
    host = read_local_host(known_packages())
    return host if cluster.address is None else replace(host, free_bytes=())


def refuse_conflicts(problems: Iterable[Problem]) -> None:
    """Raise SettingsConflict with every problem that more memory would not solve."""
    if conflicts := [problem_text(problem) for problem in problems if problem.is_conflict]:
        raise SettingsConflict("\n".join(["what the config asks for cannot work", *conflicts]))


def warnings_of(plan: Plan) -> list[str]:
    """Return the warnings with which a run may start all the same."""
    return [problem_text(p) for p in plan.problems if p.severity == "warning"]


def require_fit(plan: Plan) -> None:
    """Raise DoesNotFit with the errors of the plan and their remedies."""
    if plan.verdict == "does not fit":
        raise DoesNotFit(
            f"the run does not fit\n{verdict_text(plan)}\n"
            "`plimsoll plan --all` shows every item; --force starts the run all the same."
        )


def render_short_plan(plan: Plan, advice: Advice | None = None) -> str:
    """Return the plan in short as text, with the answers."""
    parts = [short_text(plan)]
    if advice is not None:
        parts.append(answers_text(advice, plan))
    return "\n\n".join(parts)


def render_whole_plan(plan: Plan, advice: Advice | None = None) -> str:
    """Return every item and all advice as text, with blocks on terminals that have them."""
    blocks = sys.stdout.isatty() and sys.stdout.encoding.lower().startswith("utf")
    parts = [plan_text(plan, unicode=blocks)]
    if advice is not None:
        parts.append(advice_text(advice))
    return "\n\n".join(parts)


def apply_answer(path: str, flags: Sequence[str], advice: Advice, number: int) -> str:
    """Return the text of a config with an answer in it, and with the flags of the plan.

    Raises ConfigError if there is no answer of this number, or the file's layout cannot be edited.
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
    """Return the config's values with the smallest change with which it fits, or None.

    Changes that keep what is learned come first, as in the answers. The same values return if they
    fit. `spec` is the spec of these values.

    Raises as `plan_job`.
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
    """Return the plan with its advice as JSON text."""
    return json.dumps(plan_values(plan) | advice_values(advice), indent=1) + "\n"


def _free_disk(run: RunDirectory) -> int:
    """Return the free bytes of the run's disk, and those that the run itself has saved there."""
    absolute = run.path.absolute()
    existing = next(path for path in (absolute, *absolute.parents) if path.exists())
    return shutil.disk_usage(existing).free + run.saved_bytes()


def _lacking(given: Node, live: Node, cluster: ClusterConfig) -> Iterator[Problem]:
    """Yield what the config's hardware has and this machine lacks."""
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


def tokens_at_peak(job: PlannedJob) -> float | None:
    """Return the tokens a second of a run whose cards always compute at their bf16 peak.

    None without cards, or if the speed of a card is not known.

    A token takes 2 FLOPs a parameter in each forward and each product of a backward pass (Kaplan et
    al. 2020, section 2.1). Recomputation, and attention over other tokens, are left out. So the
    share of the peak that a run reaches is a lower bound if sequences are long.
    """
    slots = {process.slot for process in job.layout.processes}
    cards = [card for slot in slots if (card := job.card(slot)) is not None]
    if job.device != "cuda" or not cards or not all(known_card(card.name) for card in cards):
        return None
    return sum(card.bf16_flops for card in cards) / _token_flops(job)


def _token_flops(job: PlannedJob) -> float:
    """Return the FLOPs of a step for each of its tokens, in all roles and in engines.

    A role that learns does a forward, in the backward pass as much for the gradients of inputs, and
    as much again for the gradients of weights. A frozen base has no gradients of weights.
    """
    spec, products = job.spec, 0.0
    for name, trained in spec.trained.items():
        forwards = 3 if trained.adapter is None else 2
        work = spec.workload.epochs * forwards + spec.roles[name].scores
        products += job.shapes[name].active_parameters * work
    products += sum(job.shapes[name].active_parameters for name in spec.frozen)
    products += job.policy.active_parameters if job.sampler is not None else 0
    return 2 * products
