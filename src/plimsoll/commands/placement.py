"""Describe as text which processes a config would run, and the size of an optimizer step."""

from __future__ import annotations

from itertools import chain, repeat
from typing import Any

from plimsoll.config.cluster import MAIN_RANKS, RANK_NAMES, ClusterConfig, NodeGroup
from plimsoll.config.engine import FrozenRole, TrainedRole
from plimsoll.config.rollout import RolloutConfig
from plimsoll.machine.host import most_busy_processes
from plimsoll.resolve.engine_rules import trainer_rules
from plimsoll.resolve.job import Sampling
from plimsoll.resolve.roles import Role
from plimsoll.resolve.run_spec import RunSpec
from plimsoll.run.numbers import plural


def placement(spec: RunSpec[Any]) -> str:
    """Return text tables of a run's processes, the values decided for `auto`, and a step's size."""
    decisions = [(made.key, f"{made.value}, since {made.why}") for made in spec.decisions]
    return (
        _table("Processes", _processes(spec))
        + (_table("Left to auto", decisions) if decisions else "")
        + _table("A step", _step(spec))
    )


def _step(spec: RunSpec[Any]) -> list[tuple[str, str]]:
    if spec.sampling is not None:
        return _sampled_step(spec, spec.sampling)
    work = spec.workload
    if work.unit == "pair":
        size = f"{work.units:,}, of two sequences of at most {work.longest:,} tokens each"
        shared = f"computed {'once' if work.shares_prompts else 'for each response'}"
        rows = [("pairs", size), ("prompts", shared)]
    else:
        most = f"at most {work.longest:,} tokens: {work.units * work.longest:,} at most"
        rows = [("sequences", f"{work.units:,}, of {most}")]
    unit = "pair" if work.unit == "pair" else "sequence"
    return [*rows, _micro_batch(spec), _of_the_run(spec, work.units, unit)]


def _processes(spec: RunSpec[Any]) -> list[tuple[str, str]]:
    cluster = spec.cluster
    roles = {name: _describe(role) for name, role in spec.roles.items()}
    if cluster.where == "local":
        rollout = spec.engines
        sampler = [] if rollout is None else [f"rollout ({rollout.engine_name})"]
        return [
            ("this process", "the controller with rank 0 of 1, no Ray"),
            *(("", text) for text in [*roles.values(), *sampler]),
            ("device, threads", f"{cluster.device}, {cluster.threads or 'all cores'}"),
        ]
    where = "this machine" if cluster.address is None else cluster.address
    rows = [
        ("this process", f"the controller; Ray on {where}"),
        (_several("rank", cluster.ranks), f"device {cluster.device}{_nodes(cluster, MAIN_RANKS)}"),
        *(("", text) for name, text in roles.items() if spec.rank_kind_of(name) == MAIN_RANKS),
    ]
    for kind, count in cluster.own_ranks.items():
        texts = [text for name, text in roles.items() if spec.rank_kind_of(name) == kind]
        texts[:1] = [text + _nodes(cluster, kind) for text in texts[:1]]
        rows += zip(chain([_several(RANK_NAMES[kind], count)], repeat("")), texts, strict=False)
    engines = 0
    if spec.engines is not None:
        text = _engine(spec.engines) + _nodes(cluster, "engines")
        rows.append((_several("engine", spec.engines.engines), text))
        engines = spec.engines.engines
    threads = cluster.threads or f"the machine's cores / {most_busy_processes(cluster, engines)}"
    return [*rows, ("threads of each", str(threads))]


def _nodes(cluster: ClusterConfig, group: NodeGroup) -> str:
    count = cluster.own_nodes.counts.get(group)
    return f", on {plural(count, 'node')} of its own" if count else ""


def _describe(role: Role) -> str:
    if role.without_adapter:
        return f"{role.name} (the actor with its adapter switched off)"
    if not role.given:
        when = ", before it is loaded" if role.early else ""
        return f"{role.name} (the actor's first weights{when})"
    settings, adapter = role.settings, ""
    if role.trained and role.trained.adapter:
        adapter = f", adapter of rank {role.trained.adapter.rank}"
    division = trainer_rules(settings).describe(settings)
    text = f"{role.name} {settings.model.path} ({_dtype(settings)}{adapter}, {division})"
    return text + (", before the actor is loaded" if role.early else "")


def _dtype(role: TrainedRole | FrozenRole) -> str:
    model = role.model
    return model.dtype if model.quantization == "none" else f"{model.quantization}, {model.dtype}"


def _engine(rollout: RolloutConfig) -> str:
    degrees = rollout.engine.degrees
    shared = [f", {n.replace('_', ' ')} {count}" for n, count in degrees.items() if count > 1]
    return (
        f"{rollout.engine_name} ({rollout.dtype}{''.join(shared)}), at most "
        f"{plural(rollout.max_sequences, 'sequence')} at once"
        + f"; samples while the ranks train (staleness {rollout.staleness})"
        * (rollout.staleness > 0)
    )


def _sampled_step(spec: RunSpec[Any], sampling: Sampling) -> list[tuple[str, str]]:
    count, longest = sampling.sequences, spec.workload.longest
    new = longest - spec.data.max_tokens
    prompts = plural(sampling.prompts, "prompt")
    responses = plural(sampling.responses, "response")
    stored = sampling.rollout.replay
    origin = "" if stored is None else f", as {stored} stored them: no engine samples"
    work = spec.workload
    updates = f"{work.updates:,}, of {plural(work.units, 'sequence')} each"
    return [
        ("sequences", f"{prompts} x {responses} = {count:,}{origin}"),
        (
            "tokens",
            f"at most {spec.data.max_tokens:,} + {new:,} = {longest:,} a sequence, "
            f"{count * longest:,} in all",
        ),
        *([_micro_batch(spec), ("optimizer steps", updates)] if spec.trained else []),
        _of_the_run(spec, count, "sequence"),
    ]


def _micro_batch(spec: RunSpec[Any]) -> tuple[str, str]:
    shards = {kind: spec.cluster.shards_of(kind) for kind in spec.cluster.rank_counts}
    sharing = [f"{n} {RANK_NAMES[kind]}s" for kind, n in shards.items() if n > 1]
    where = f"in a pack, which {' and '.join(sharing)} share" if sharing else "on a rank"
    return "micro-batch", f"at most {spec.workload.budget:,} tokens {where}"


def _of_the_run(spec: RunSpec[Any], count: int, unit: str) -> tuple[str, str]:
    steps = spec.known_steps
    if steps is None:
        later = "its steps are known once the rows are read"
        return "of the run", f"run.epochs: {spec.run.epochs:g}; {later}"
    return "of the run", f"{plural(steps, 'step')}, {plural(steps * count, unit)}"


def _several(name: str, count: int) -> str:
    return f"{name} 0" if count == 1 else f"{name}s 0-{count - 1}"


def _table(title: str, rows: list[tuple[str, str]]) -> str:
    return "\n".join([title, *(f"  {name:<16} {text}" for name, text in rows)]) + "\n"
