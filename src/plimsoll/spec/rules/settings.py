"""What must agree between the keys of a config: every contradiction is named, none is repaired."""

from __future__ import annotations

from collections.abc import Iterator
from types import MappingProxyType
from typing import Any

from plimsoll.config.data import DataConfig
from plimsoll.config.engine import TrainedRole
from plimsoll.config.problems import Problem, conflict, find, invalid, refuse, show
from plimsoll.config.yaml_tree import Origins
from plimsoll.spec.rules.adapters import adapted, frozen
from plimsoll.spec.rules.memory import memory_levers
from plimsoll.spec.rules.progress import evaluated, scheduled
from plimsoll.spec.run_spec import RunSpec


def _unread(spec: RunSpec[Any]) -> Iterator[Problem]:
    """Keys that every config has, and that this job, or this run, would not look at."""
    separator = DataConfig.model_fields["step_separator"]
    if spec.data.step_separator != separator.default and not spec.job.has_steps:
        yield invalid(
            "data.step_separator",
            show(spec.data.step_separator),
            "Only the rows of a process reward model (plimsoll prm) have steps.",
            "leave data.step_separator out",
            code="data-columns",
        )
    if spec.cluster.critic_ranks is not None and "critic" not in spec.trained:
        yield conflict(
            "cluster.critic_ranks",
            str(spec.cluster.critic_ranks),
            "This job trains no critic.",
            "leave cluster.critic_ranks out",
            code="critic-ranks",
        )
    if spec.run.eval_every is not None and spec.data.eval is None:
        yield conflict(
            "run.eval_every",
            str(spec.run.eval_every),
            "There is nothing to evaluate on: data.eval is not given.",
            "give data.eval.path and its columns, or leave run.eval_every out",
            code="no-eval-data",
        )


def _cluster(spec: RunSpec[Any]) -> Iterator[Problem]:
    cluster = spec.cluster
    if cluster.where != "local":
        return
    own, ranks, nodes, address = cluster.critic_ranks, cluster.ranks, cluster.nodes, cluster.address
    if own is not None:
        yield _on_ray("critic_ranks", str(own), "is this one process, which the critic shares")
    if ranks > 1:
        yield _on_ray("ranks", str(ranks), "is this one process, so there is one rank", "1")
    if nodes > 1:
        yield _on_ray("nodes", str(nodes), "is this one process, on this machine", "1")
    if address is not None:
        yield _on_ray("address", show(address), "starts no Ray, so there is no cluster to join")


def _on_ray(key: str, value: str, why: str, instead: str | None = None) -> Problem:
    """Of a key of the cluster that one process cannot do."""
    other = f"leave cluster.{key} out" if instead is None else f"cluster.{key}: {instead}"
    return conflict(
        f"cluster.{key}",
        value,
        f"cluster.where: local {why}.",
        f"cluster.where: ray, or {other}",
        code="local-one-process",
    )


def _trained(spec: RunSpec[Any]) -> Iterator[Problem]:
    """Roles that learn."""
    for name, role in spec.trained.items():
        learning = max(0, spec.run.steps - spec.roles[name].begins)
        yield from _role(name, role, learning * spec.workload.updates)


def _frozen(spec: RunSpec[Any]) -> Iterator[Problem]:
    """Roles that only score."""
    for role in spec.roles.values():
        if role.frozen is not None and role.given:
            yield from frozen(role.key, role.frozen)


def _columns(spec: RunSpec[Any]) -> Iterator[Problem]:
    for key, source in spec.data.sources().items():
        yield from spec.job.columns(key, source)


def _of_the_job(spec: RunSpec[Any]) -> Iterator[Problem]:
    return spec.job.rules(spec.config)


def _role(name: str, role: TrainedRole, updates: int) -> Iterator[Problem]:
    """One trained role; updates: the optimizer steps of the whole run."""
    yield from adapted(name, role)
    yield from scheduled(name, role, updates)
    yield from _offload(name, role)
    yield from _gradient_dtype(name, role)
    for beta, value in (("beta1", role.optimizer.beta1), ("beta2", role.optimizer.beta2)):
        if value >= 1:
            yield invalid(
                f"{name}.optimizer.{beta}",
                str(value),
                "Adam's moving averages forget nothing at 1, and grow without bound above it.",
                "a number below 1, such as 0.9",
                code="optimizer-value",
            )


def _offload(name: str, role: TrainedRole) -> Iterator[Problem]:
    zero = role.zero
    if zero.parameter_offload == "cpu" and zero.stage != 3:
        yield conflict(
            f"{name}.zero.parameter_offload",
            "cpu",
            f"Only ZeRO stage 3 divides the weights and can move them; the stage is {zero.stage}.",
            f"{name}.zero.stage: 3, or {name}.zero.parameter_offload: none",
            code="offload-stage",
        )
    if zero.optimizer_offload == "cpu" and zero.stage == 0:
        yield conflict(
            f"{name}.zero.optimizer_offload",
            "cpu",
            "DeepSpeed offloads the optimizer from ZeRO stage 1 on; the stage is 0.",
            f"{name}.zero.stage: 1 (one rank holds the same with it), "
            f"or {name}.zero.optimizer_offload: none",
            code="offload-stage",
        )
    if zero.optimizer_offload == "cpu" and role.optimizer.kind != "adamw":
        yield conflict(
            f"{name}.zero.optimizer_offload",
            "cpu",
            f"DeepSpeedCPUAdam, which steps on the host, is AdamW alone, and no "
            f"{role.optimizer.kind} ({name}.optimizer.kind).",
            f"{name}.zero.optimizer_offload: none, or {name}.optimizer.kind: adamw",
            code="adamw-8bit-offload",
        )


def _gradient_dtype(name: str, role: TrainedRole) -> Iterator[Problem]:
    zero = role.zero
    if zero.gradient_dtype == "float32" and zero.stage == 0 and role.model.dtype == "bfloat16":
        yield conflict(
            f"{name}.zero.gradient_dtype",
            "float32",
            "At stage 0 DeepSpeed adds the gradients of bfloat16 weights in bfloat16.",
            f"{name}.zero.stage: 1 or more, or {name}.zero.gradient_dtype: auto",
            code="gradient-dtype",
        )
    if zero.gradient_dtype == "bfloat16" and role.model.dtype == "float32":
        yield conflict(
            f"{name}.zero.gradient_dtype",
            "bfloat16",
            f"The weights are float32 ({name}.model.dtype), and so are their gradients.",
            f"{name}.zero.gradient_dtype: auto, or {name}.model.dtype: bfloat16",
            code="gradient-dtype",
        )


def _budget(spec: RunSpec[Any]) -> Iterator[Problem]:
    work = spec.workload
    longest, why = work.together * work.longest, work.length_keys
    if work.unit == "pair":
        why = f"two sequences of {work.length_keys} each, which stay together"
    if longest > work.budget:
        what = "pair" if work.unit == "pair" else "sequence"
        yield conflict(
            "batch.micro_batch_tokens",
            str(work.budget),
            f"A {what} may be {longest} tokens long ({why}) and would fit no micro-batch.",
            f"batch.micro_batch_tokens: {longest}, or shorter sequences",
            code="micro-batch-tokens",
        )


SETTINGS_RULES = (
    _cluster,
    evaluated,
    memory_levers,
    _unread,
    _trained,
    _frozen,
    _columns,
    _of_the_job,
    _budget,
)


def check_agreement(spec: RunSpec[Any], origins: Origins = MappingProxyType({})) -> None:
    """Refuse settings that contradict one another, all of them in one error.

    origins: where each key was written, as `read_config` gives them.
    Raises ConfigError (exit code 2) for values that can never do; SettingsConflict (4) where
    every problem is between settings that are right by themselves.
    """
    refuse(find(SETTINGS_RULES, spec), origins)
