"""What must agree between the keys of a config: every contradiction is named, none is repaired."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import MappingProxyType

from plimsoll.config.agree_adapters import adapted, frozen, separate, steady
from plimsoll.config.agree_memory import memory_levers
from plimsoll.config.agree_ppo import sampled
from plimsoll.config.agree_progress import evaluated, scheduled
from plimsoll.config.agree_reference import stored_logprobs
from plimsoll.config.agree_sources import (
    labelled_source,
    pair_source,
    rl_source,
    sft_source,
    step_source,
)
from plimsoll.config.cluster import ClusterConfig
from plimsoll.config.data import DataConfig, SourceConfig
from plimsoll.config.engine import TrainedRole
from plimsoll.config.jobs import (
    ComparedJobConfig,
    DistillConfig,
    DpoConfig,
    JobConfig,
    KtoConfig,
    PairJobConfig,
    PpoConfig,
    PrmConfig,
    RmConfig,
    SequenceJobConfig,
    SftConfig,
)
from plimsoll.config.problems import Problem, refuse, show
from plimsoll.config.roles import given_frozen, key_of, trained_roles
from plimsoll.config.yaml_tree import Origins

SourceCheck = Callable[[str, SourceConfig], Iterator[Problem]]
"""What is wrong with a source's columns for a job."""


def check_agreement(config: JobConfig, origins: Origins = MappingProxyType({})) -> None:
    """Refuse settings that contradict one another, all of them in one error.

    origins: where each key was written, as `read_config` gives them.
    Raises ConfigError (exit code 2) for values that can never do; SettingsConflict (4) where
    every problem is between settings that are right by themselves.
    """
    refuse(_problems(config), origins)


def _problems(config: JobConfig) -> Iterator[Problem]:
    match config:
        case SftConfig() | DistillConfig():
            return _sequences(config, sft_source)
        case PrmConfig():
            return _sequences(config, step_source)
        case KtoConfig():
            return _sequences(config, labelled_source)
        case DpoConfig() | RmConfig():
            return _pairs(config)
        case PpoConfig():
            return _ppo(config)


def _sequences(config: SequenceJobConfig, check: SourceCheck) -> Iterator[Problem]:
    yield from _common(config)
    yield from _role("actor", config.actor, config.run.steps)
    for name, source in config.data.sources().items():
        yield from check(name, source)
    yield from _budget(config, config.data.max_tokens, "data.max_tokens")


def _pairs(config: PairJobConfig) -> Iterator[Problem]:
    margin = ("margin",) if isinstance(config, RmConfig) else ()
    yield from _common(config)
    yield from _role("actor", config.actor, config.run.steps)
    for name, source in config.data.sources().items():
        yield from pair_source(name, source, *margin)
    why = "two sequences of data.max_tokens each, which stay together"
    yield from _budget(config, 2 * config.data.max_tokens, why, what="pair")


def _ppo(config: PpoConfig) -> Iterator[Problem]:
    algorithm, steps = config.algorithm, config.run.steps
    updates = algorithm.epochs * algorithm.mini_batches
    learning = max(0, steps - algorithm.critic_warmup_steps)  # of the actor
    yield from _common(config)
    yield from _role("actor", config.actor, learning * updates)
    yield from _role("critic", config.critic, steps * updates)
    yield from steady("actor", config.actor)
    yield from steady("critic", config.critic)
    yield from separate(config)
    for name, source in config.data.sources().items():
        yield from rl_source(name, source)
    yield from sampled(config)
    longest = config.data.max_tokens + config.rollout.sampling.max_new_tokens
    yield from _budget(config, longest, "data.max_tokens + rollout.sampling.max_new_tokens")


def _common(config: JobConfig) -> Iterator[Problem]:
    yield from _cluster(config.cluster)
    yield from evaluated(config)
    yield from memory_levers(config)
    separator = DataConfig.model_fields["step_separator"]
    if config.data.step_separator != separator.default and not isinstance(config, PrmConfig):
        yield Problem(
            "data.step_separator",
            show(config.data.step_separator),
            "Only the rows of a process reward model (plimsoll prm) have steps.",
            "leave data.step_separator out",
            code="data-columns",
        )
    if config.cluster.critic_ranks is not None and "critic" not in trained_roles(config):
        yield Problem(
            "cluster.critic_ranks",
            str(config.cluster.critic_ranks),
            "This job trains no critic.",
            "leave cluster.critic_ranks out",
            code="critic-ranks",
            conflict=True,
        )
    for name, role in given_frozen(config).items():
        yield from frozen(key_of(name), role)
    if isinstance(config, ComparedJobConfig):
        yield from stored_logprobs(config.reference_logprobs)
    if config.run.eval_every is not None and config.data.eval is None:
        yield Problem(
            "run.eval_every",
            str(config.run.eval_every),
            "There is nothing to evaluate on: data.eval is not given.",
            "give data.eval.path and its columns, or leave run.eval_every out",
            code="no-eval-data",
            conflict=True,
        )


def _cluster(cluster: ClusterConfig) -> Iterator[Problem]:
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
    return Problem(
        f"cluster.{key}",
        value,
        f"cluster.where: local {why}.",
        f"cluster.where: ray, or {other}",
        code="local-one-process",
        conflict=True,
    )


def _role(name: str, role: TrainedRole, updates: int) -> Iterator[Problem]:
    """One trained role; updates: the optimizer steps of the whole run."""
    yield from adapted(name, role)
    yield from scheduled(name, role, updates)
    yield from _offload(name, role)
    yield from _gradient_dtype(name, role)
    for beta, value in (("beta1", role.optimizer.beta1), ("beta2", role.optimizer.beta2)):
        if value >= 1:
            yield Problem(
                f"{name}.optimizer.{beta}",
                str(value),
                "Adam's moving averages forget nothing at 1, and grow without bound above it.",
                "a number below 1, such as 0.9",
                code="optimizer-value",
            )


def _offload(name: str, role: TrainedRole) -> Iterator[Problem]:
    zero = role.zero
    if zero.parameter_offload == "cpu" and zero.stage != 3:
        yield Problem(
            f"{name}.zero.parameter_offload",
            "cpu",
            f"Only ZeRO stage 3 divides the weights and can move them; the stage is {zero.stage}.",
            f"{name}.zero.stage: 3, or {name}.zero.parameter_offload: none",
            code="offload-stage",
            conflict=True,
        )
    if zero.optimizer_offload == "cpu" and zero.stage == 0:
        yield Problem(
            f"{name}.zero.optimizer_offload",
            "cpu",
            "DeepSpeed offloads the optimizer from ZeRO stage 1 on; the stage is 0.",
            f"{name}.zero.stage: 1 (one rank holds the same with it), "
            f"or {name}.zero.optimizer_offload: none",
            code="offload-stage",
            conflict=True,
        )
    if zero.optimizer_offload == "cpu" and role.optimizer.kind != "adamw":
        yield Problem(
            f"{name}.zero.optimizer_offload",
            "cpu",
            f"DeepSpeedCPUAdam, which steps on the host, is AdamW alone, and no "
            f"{role.optimizer.kind} ({name}.optimizer.kind).",
            f"{name}.zero.optimizer_offload: none, or {name}.optimizer.kind: adamw",
            code="adamw-8bit-offload",
            conflict=True,
        )


def _gradient_dtype(name: str, role: TrainedRole) -> Iterator[Problem]:
    zero = role.zero
    if zero.gradient_dtype == "float32" and zero.stage == 0 and role.model.dtype == "bfloat16":
        yield Problem(
            f"{name}.zero.gradient_dtype",
            "float32",
            "At stage 0 DeepSpeed adds the gradients of bfloat16 weights in bfloat16.",
            f"{name}.zero.stage: 1 or more, or {name}.zero.gradient_dtype: auto",
            code="gradient-dtype",
            conflict=True,
        )
    if zero.gradient_dtype == "bfloat16" and role.model.dtype == "float32":
        yield Problem(
            f"{name}.zero.gradient_dtype",
            "bfloat16",
            f"The weights are float32 ({name}.model.dtype), and so are their gradients.",
            f"{name}.zero.gradient_dtype: auto, or {name}.model.dtype: bfloat16",
            code="gradient-dtype",
            conflict=True,
        )


def _budget(config: JobConfig, longest: int, why: str, what: str = "sequence") -> Iterator[Problem]:
    """longest: tokens of the longest sequence (or pair); why: the keys that make it so long."""
    if longest > config.batch.micro_batch_tokens:
        yield Problem(
            "batch.micro_batch_tokens",
            str(config.batch.micro_batch_tokens),
            f"A {what} may be {longest} tokens long ({why}) and would fit no micro-batch.",
            f"batch.micro_batch_tokens: {longest}, or shorter sequences",
            code="micro-batch-tokens",
            conflict=True,
        )
