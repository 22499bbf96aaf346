"""Rules between the keys of a config: contradictions are reported, not repaired."""

from __future__ import annotations

from collections.abc import Iterator
from types import MappingProxyType
from typing import Any, get_args

from plimsoll.config.cluster import MAIN_RANKS, RANK_KEYS, SHARD_KEYS, NodeGroup
from plimsoll.config.data import EVALUATED, DataConfig, EvalSource, set_name
from plimsoll.config.engines import HasEngine
from plimsoll.config.problems import Problem, Section, conflict, find, invalid, refuse, show
from plimsoll.config.yaml_tree import Origins
from plimsoll.resolve.decisions import against_heads
from plimsoll.resolve.engine_rules import all_rules
from plimsoll.resolve.rules.training import (
    check_adapter,
    check_evaluations,
    check_length,
    check_schedule,
)
from plimsoll.resolve.run_spec import RunSpec

MOST_PROCESSES = 100_000
"""The most ranks and parts of engines together; also the most nodes of a run."""


def _unread(spec: RunSpec[Any]) -> Iterator[Problem]:
    """Yield a problem for each given key that this job or this run would not read."""
    at = Section("", spec.config)
    separator = DataConfig.model_fields["step_separator"]
    if spec.data.step_separator != separator.default and not spec.job.has_steps:
        why = "Only the rows of a process reward model (plimsoll prm) have steps."
        fix = "leave data.step_separator out"
        yield at.invalid("data.step_separator", why, fix, "data-columns")
    if "tensorboard" in spec.run.loggers and not spec.run.tensorboard:
        why = "run.tensorboard is false, which turns TensorBoard off."
        yield at.invalid("run.loggers", why, "leave one of the two out")
    yield from _streams(spec)
    yield from _own_ranks(spec)
    if spec.sampling is None:
        yield from _unread_of_sets(spec)
    if spec.run.eval_every is not None and spec.data.eval is None:
        why = "There is nothing to evaluate on: data.eval is not given."
        fix = "give data.eval.path and its columns, or leave run.eval_every out"
        yield at.conflict("run.eval_every", why, fix, "no-eval-data")


def _streams(spec: RunSpec[Any]) -> Iterator[Problem]:
    """Yield a problem for each stream of rows that this run would have to know as a whole."""
    for key, source in spec.data.sources().items():
        if not source.streaming:
            continue
        why = ""
        if key not in spec.data.train_sources():
            why = "Held-out rows are all evaluated."
        elif not spec.job.streams:
            why = f"plimsoll {spec.job.name} looks at all rows before it begins."
        elif spec.run.epochs is not None:
            why = "The rows of a stream are not counted, and run.epochs is given."
        elif getattr(getattr(spec.config, "reference_logprobs", None), "precompute", False):
            why = "reference_logprobs.precompute reads all rows before the first step."
        if why:
            fix = "run.steps" if "epochs" in why else f"leave {key}.streaming out"
            yield Section(key, source).conflict("streaming", why, fix, "data-streaming")


def _own_ranks(spec: RunSpec[Any]) -> Iterator[Problem]:
    """Yield a problem for each group of ranks that would have no role, the actor's included."""
    at, groups = Section("cluster", spec.cluster), {role.group for role in spec.roles.values()}
    if "critic" in spec.cluster.own_ranks and "critic" not in groups:
        why = "This job trains no critic."
        yield at.conflict("critic_ranks", why, "leave cluster.critic_ranks out", "critic-ranks")
    if "reward" in spec.cluster.own_ranks and "reward" not in groups:
        why = "No reward model scores responses in this run."
        yield at.conflict("reward_ranks", why, "leave cluster.reward_ranks out", "reward-ranks")
    elif "reward" in spec.cluster.own_ranks and groups == {"reward"}:
        count = spec.cluster.reward_ranks
        why = "Reward models are the only models here, so cluster.ranks are theirs alone."
        fix = f"cluster.ranks: {count}, and leave cluster.reward_ranks out"
        yield at.conflict("reward_ranks", why, fix, "reward-ranks")


def _unread_of_sets(spec: RunSpec[Any]) -> Iterator[Problem]:
    """Yield a problem for each setting of `data.eval` that only jobs that sample use."""
    sets = spec.data.eval_sources()
    why = "Only jobs that sample answer held-out rows"
    if sets and "data.eval" not in sets:
        fix = "one source as data.eval; `plimsoll eval` measures on others with --data.eval.path"
        names = show([*map(set_name, sets)])
        yield invalid("data.eval", names, f"{why}, and have several sets of them.", fix)
    fields = EvalSource.model_fields
    for key, source in sets.items():
        for name in EVALUATED:
            if getattr(source, name) != fields[name].default:
                yield Section(key, source).invalid(name, f"{why}.", f"leave {key}.{name} out")


def _processes(spec: RunSpec[Any]) -> Iterator[Problem]:
    """Yield a problem if there are too many processes or machines to be counted one by one."""
    cluster, engines = spec.cluster, spec.engines
    counts = {
        **{f"cluster.{RANK_KEYS[kind]}": n for kind, n in cluster.rank_counts.items()},
        "cluster.nodes": cluster.nodes,
    }
    if engines is not None:
        counts |= {"rollout.engines": engines.engines, **engines.degrees}
    at = Section("", spec.config)
    parts = 0 if engines is None else engines.all_parts
    over = [key for key, count in counts.items() if count > MOST_PROCESSES]
    if not over and cluster.all_ranks + parts > MOST_PROCESSES:
        over = [max(counts, key=lambda key: counts[key])]
    for key in over:
        why = f"Ranks, parts of engines and nodes are {MOST_PROCESSES:,} at most in a run."
        yield at.invalid(key, why, "a smaller number")


def _cluster(spec: RunSpec[Any]) -> Iterator[Problem]:
    cluster = spec.cluster
    if cluster.where != "local":
        return
    problems: dict[str, tuple[str, str]] = {}  # why, and the remedy
    for kind in cluster.own_ranks:
        who = "the critic shares" if kind == "critic" else "reward models share"
        why, key = f"is this one process, which {who}", RANK_KEYS[kind]
        problems[key] = why, f"leave cluster.{key} out"
    if cluster.ranks > 1:
        problems["ranks"] = "is this one process, so there is one rank", "cluster.ranks: 1"
    if cluster.nodes > 1:
        problems["nodes"] = "is this one process, on this machine", "cluster.nodes: 1"
    if cluster.own_nodes.counts:
        why = "is this one process, on this machine"
        problems["own_nodes"] = why, "leave cluster.own_nodes out"
    if cluster.address is not None:
        why = "starts no Ray, so there is no cluster to join"
        problems["address"] = why, "leave cluster.address out"
    for key, (why, remedy) in problems.items():
        fix = f"cluster.where: ray, or {remedy}"
        yield Section("cluster", cluster).conflict(
            key, f"cluster.where: local {why}.", fix, "local-one-process"
        )


def _shared_packs(spec: RunSpec[Any]) -> Iterator[Problem]:
    """Yield problems of ranks that share packs: their number, and heads that do not divide."""
    cluster, at = spec.cluster, Section("cluster", spec.cluster)
    given = SHARD_KEYS[MAIN_RANKS]
    for kind, ranks in cluster.rank_counts.items():
        shards, key = cluster.shards_of(kind), SHARD_KEYS[kind]
        if ranks % shards:
            of = "" if getattr(cluster, key) else f" (from cluster.{given})"
            why = f"Each pack is shared by {shards} ranks{of}, and cluster.{RANK_KEYS[kind]} is "
            why += f"{ranks}, no multiple of that."
            more = -(-ranks // shards) * shards
            fix = f"cluster.{RANK_KEYS[kind]}: {more}, or a divisor of {ranks}"
            at_key = key if getattr(cluster, key) else given
            yield at.conflict(at_key, why, fix, "sequence-parallel")
    for kind, key in SHARD_KEYS.items():
        if kind not in cluster.rank_counts and getattr(cluster, key) is not None:
            why = f"cluster.{RANK_KEYS[kind]} is not given, so these roles are on cluster.ranks."
            fix = f"leave cluster.{key} out: cluster.{given} is for all of them"
            yield at.conflict(key, why, fix, "sequence-parallel")
    if cluster.sequence_exchange == "heads":
        for name, model in spec.models.items():
            if why := against_heads(model.path, spec.shards_of(name)):
                fix = "cluster.sequence_exchange: keys, or a sequence_parallel that divides them"
                yield at.conflict("sequence_exchange", f"{why}.", fix, "sequence-parallel")


def _own_nodes(spec: RunSpec[Any]) -> Iterator[Problem]:
    """Yield problems of `cluster.own_nodes`: all groups have their own nodes, or none has."""
    cluster, engines = spec.cluster, spec.engines
    counts, at = cluster.own_nodes.counts, Section("cluster.own_nodes", cluster.own_nodes)
    if not counts or cluster.where == "local":
        return
    processes = dict[NodeGroup, int](cluster.rank_counts.items())
    if engines is not None and engines.placement == "own":
        processes["engines"] = engines.engines
    for group in get_args(NodeGroup):
        most, nodes = processes.get(group, 0), counts.get(group, 0)
        if most and not nodes:
            why = "Other groups have nodes of their own, and this one has processes."
            yield at.conflict(group, why, f"cluster.own_nodes.{group}: 1", "own-nodes")
        elif nodes > most:
            why = f"The group's own ranks or engines are {most} in number."
            fix = f"{most}" if most else f"leave cluster.own_nodes.{group} out"
            yield at.conflict(group, why, fix, "own-nodes")
    if sum(counts.values()) > cluster.nodes:
        why = f"The groups of cluster.own_nodes have {sum(counts.values())} nodes together."
        fix = f"cluster.nodes: {sum(counts.values())}"
        yield Section("cluster", cluster).conflict("nodes", why, fix, "own-nodes")


def _rank_sleep(spec: RunSpec[Any]) -> Iterator[Problem]:
    """Yield a problem if ranks are to sleep for engines that do not use their cards."""
    if spec.cluster.rank_sleep == "none":
        return
    at, key = Section("cluster", spec.cluster), "cluster.rank_sleep"
    if spec.sampling is None:
        why = "This job starts no engines that would use what ranks give up."
        yield at.conflict("rank_sleep", why, f"leave {key} out", "sleep-not-shared")
    elif spec.sampling.rollout.placement != "shared":
        why = "Engines have cards of their own (rollout.placement: own), and use nothing of what "
        why += "ranks give up."
        fix = f"rollout.placement: shared, or leave {key} out"
        yield at.conflict("rank_sleep", why, fix, "sleep-not-shared")


def _roles(spec: RunSpec[Any]) -> Iterator[Problem]:
    """Yield problems of each role that learns: adapter, schedule, optimizer."""
    for name, role in spec.trained.items():
        steps, at = spec.known_steps, Section(name, role)
        if steps is not None:
            steps = max(0, steps - spec.roles[name].begins) * spec.workload.updates
        yield from check_adapter(name, role)
        begins = spec.roles[name].sends and any(not r.given for r in spec.roles.values())
        if begins and role.adapter and role.adapter.path:
            why = (
                "The reference would be the model without any adapter, not the actor as it begins."
            )
            fix = "reference.model.path: what `plimsoll merge` makes of this adapter"
            yield at.conflict("adapter.path", why, fix, "adapter-start")
        yield from check_schedule(name, role, steps)
        for beta, value in (("beta1", role.optimizer.beta1), ("beta2", role.optimizer.beta2)):
            if value >= 1:
                why = "Adam's moving averages forget nothing at 1, and grow without bound above it."
                fix = "a number below 1, such as 0.9"
                yield at.invalid(f"optimizer.{beta}", why, fix, "optimizer-value")


def _checkpointing(spec: RunSpec[Any]) -> Iterator[Problem]:
    for name, role in spec.trained.items():
        if role.model.gradient_checkpointing is not False:
            continue
        for key, unset in (("checkpoint_every", 1), ("activation_offload", "none")):
            if getattr(role.model, key) != unset:
                why = f"No layer is checkpointed ({name}.model.gradient_checkpointing: false)."
                fix = f"{name}.model.gradient_checkpointing: true, or leave {name}.model.{key} out"
                yield Section(name, role).conflict(f"model.{key}", why, fix, "checkpointing-off")


def _of_the_job(spec: RunSpec[Any]) -> Iterator[Problem]:
    for key, source in spec.data.sources().items():
        yield from spec.job.columns(key, source)
    yield from spec.job.rules(spec.config)


def _budget(spec: RunSpec[Any]) -> Iterator[Problem]:
    at = Section("", spec.config)
    work = spec.workload
    why = work.length_keys
    if work.unit == "pair":
        why = f"two sequences of {work.length_keys} each, which stay together"
    if work.least_budget > work.budget:
        what = "pair" if work.unit == "pair" else "sequence"
        why = f"A {what} may be {work.least_budget} tokens long ({why}) and would fit no "
        why += "micro-batch."
        least = -(-work.least_budget // spec.cluster.sequence_parallel)
        fix = f"batch.micro_batch_tokens: {least}, or shorter sequences"
        yield at.conflict("batch.micro_batch_tokens", why, fix, "micro-batch-tokens")


def _engine_sections(spec: RunSpec[Any]) -> Iterator[Problem]:
    """Yield a problem for each section with the settings of several engines."""
    sections: dict[str, HasEngine] = {role.key: role.settings for role in spec.roles.values()}
    if spec.sampling is not None:
        sections["rollout"] = spec.sampling.rollout
    for key, section in sections.items():
        first, *others = section.engine_names
        for name in others:
            why = f"{key} has the settings of the engine {first} too, and one engine does the work."
            fix = f"leave {key}.{name} out, or {key}.{first}"
            yield conflict(f"{key}.{name}", "given", why, fix, code="engine-twice")


def _engines(spec: RunSpec[Any]) -> Iterator[Problem]:
    """Yield the problems that the rules of the run's engines find in the settings."""
    for rules in all_rules(spec):
        yield from rules.settings(spec)


SETTINGS_RULES = (
    _engine_sections,
    check_length,
    _processes,
    _cluster,
    _shared_packs,
    _own_nodes,
    _rank_sleep,
    check_evaluations,
    _checkpointing,
    _engines,
    _unread,
    _roles,
    _of_the_job,
    _budget,
)


def check_agreement(spec: RunSpec[Any], origins: Origins = MappingProxyType({})) -> None:
    """Raise one error that lists all contradictions between settings; do nothing without any.

    `origins` says where each key was written (see `read_spec`). The error is that of `refuse`.
    """
    refuse(find(SETTINGS_RULES, spec), origins)
