"""What must agree between the keys of a config: every contradiction is named, none is repaired."""

from __future__ import annotations

from collections.abc import Iterator

from plimsoll.config.algorithm import KlConfig
from plimsoll.config.cluster import ClusterConfig
from plimsoll.config.data import SourceConfig
from plimsoll.config.engine import TrainedRole
from plimsoll.config.jobs import JobConfig, PpoConfig, SftConfig
from plimsoll.config.problems import Problem, refuse, show


def check_agreement(config: JobConfig) -> None:
    """Refuse settings that contradict one another, all of them in one error.

    Raises ConfigError (exit code 2) for values that can never do; SettingsConflict (4) where
    every problem is between settings that are right by themselves.
    """
    refuse(_sft(config) if isinstance(config, SftConfig) else _ppo(config))


def _sft(config: SftConfig) -> Iterator[Problem]:
    yield from _common(config)
    yield from _role("actor", config.actor, config.run.steps)
    yield from _sft_source("data.train", config.data.train)
    if config.data.eval is not None:
        yield from _sft_source("data.eval", config.data.eval)
    yield from _budget(config, config.data.max_tokens, "data.max_tokens")


def _ppo(config: PpoConfig) -> Iterator[Problem]:
    updates = config.run.steps * config.algorithm.epochs * config.algorithm.mini_batches
    yield from _common(config)
    yield from _role("actor", config.actor, updates)
    yield from _role("critic", config.critic, updates)
    yield from _rl_source("data.train", config.data.train)
    if config.data.eval is not None:
        yield from _rl_source("data.eval", config.data.eval)
    yield from _rollout(config)
    yield from _sampling(config)
    yield from _kl(config.algorithm.kl, reference_given=config.reference is not None)
    yield from _steps(config)
    longest = config.data.max_tokens + config.rollout.sampling.max_new_tokens
    yield from _budget(config, longest, "data.max_tokens + rollout.sampling.max_new_tokens")


def _common(config: JobConfig) -> Iterator[Problem]:
    yield from _cluster(config.cluster)
    if config.run.eval_every is not None and config.data.eval is None:
        yield Problem(
            "run.eval_every",
            str(config.run.eval_every),
            "There is nothing to evaluate on: data.eval is not given.",
            "give data.eval.path and its columns, or leave run.eval_every out",
            conflict=True,
        )


def _cluster(cluster: ClusterConfig) -> Iterator[Problem]:
    if cluster.where != "local":
        return
    if cluster.ranks > 1:
        yield Problem(
            "cluster.ranks",
            str(cluster.ranks),
            "cluster.where: local is this one process, so there is one rank.",
            "cluster.where: ray, or cluster.ranks: 1",
            conflict=True,
        )
    if cluster.address is not None:
        yield Problem(
            "cluster.address",
            show(cluster.address),
            "cluster.where: local starts no Ray, so there is no cluster to join.",
            "cluster.where: ray, or leave cluster.address out",
            conflict=True,
        )


def _role(name: str, role: TrainedRole, updates: int) -> Iterator[Problem]:
    """One trained role; updates: the optimizer steps of the whole run."""
    zero, optimizer = role.zero, role.optimizer
    if zero.parameter_offload == "cpu" and zero.stage != 3:
        yield Problem(
            f"{name}.zero.parameter_offload",
            "cpu",
            f"Only ZeRO stage 3 divides the weights and can move them; the stage is {zero.stage}.",
            f"{name}.zero.stage: 3, or {name}.zero.parameter_offload: none",
            conflict=True,
        )
    if zero.optimizer_offload == "cpu" and zero.stage == 0:
        yield Problem(
            f"{name}.zero.optimizer_offload",
            "cpu",
            "DeepSpeed offloads the optimizer from ZeRO stage 1 on; the stage is 0.",
            f"{name}.zero.stage: 1 (one rank holds the same with it), "
            f"or {name}.zero.optimizer_offload: none",
            conflict=True,
        )
    if optimizer.final_ratio > 1:
        yield Problem(
            f"{name}.optimizer.final_ratio",
            str(optimizer.final_ratio),
            "It is a share of the peak learning rate.",
            "a number from 0 to 1",
        )
    if optimizer.warmup_steps > updates:
        yield Problem(
            f"{name}.optimizer.warmup_steps",
            str(optimizer.warmup_steps),
            f"The run has {updates} optimizer steps, so the peak would never be reached.",
            f"at most {updates}, or more run.steps",
        )
    for beta in ("beta1", "beta2"):
        value = optimizer.beta1 if beta == "beta1" else optimizer.beta2
        if value >= 1:
            yield Problem(
                f"{name}.optimizer.{beta}",
                str(value),
                "Adam's moving averages forget nothing at 1, and grow without bound above it.",
                "a number below 1, such as 0.9",
            )


def _sft_source(name: str, source: SourceConfig) -> Iterator[Problem]:
    columns = {"prompt": source.prompt, "response": source.response}
    given = [column for column, value in columns.items() if value is not None]
    if source.messages is not None and given:
        yield Problem(
            f"{name}.messages",
            show(source.messages),
            f"The rows are given two ways: {name}.{given[0]} is set too.",
            f"{name}.messages alone, or {name}.prompt with {name}.response",
        )
    elif source.messages is None and len(given) < 2:
        missing = [column for column in columns if column not in given]
        yield Problem(
            f"{name}.{missing[0]}",
            None,
            f"SFT needs to know where prompt and response are; {' and '.join(missing)} "
            f"{'is' if len(missing) == 1 else 'are'} not given.",
            f"{name}.messages: COLUMN, or {name}.prompt: COLUMN with {name}.response: COLUMN",
        )


def _rl_source(name: str, source: SourceConfig) -> Iterator[Problem]:
    if source.messages is not None and source.prompt is not None:
        yield Problem(
            f"{name}.messages",
            show(source.messages),
            f"The prompts are given two ways: {name}.prompt is set too.",
            f"one of {name}.messages and {name}.prompt",
        )
    if source.messages is None and source.prompt is None:
        yield Problem(
            f"{name}.prompt",
            None,
            "There is no column to take prompts from.",
            f"{name}.prompt: COLUMN, or {name}.messages: COLUMN",
        )


def _rollout(config: PpoConfig) -> Iterator[Problem]:
    rollout = config.rollout
    if config.cluster.where == "local" and rollout.engine == "vllm":
        yield Problem(
            "rollout.engine",
            "vllm",
            "vLLM engines are Ray actors; cluster.where: local samples in this process.",
            "rollout.engine: transformers, or cluster.where: ray",
            conflict=True,
        )
    if config.cluster.where == "local" and rollout.engines > 1:
        yield Problem(
            "rollout.engines",
            str(rollout.engines),
            "cluster.where: local samples in this one process.",
            "rollout.engines: 1, or cluster.where: ray",
            conflict=True,
        )
    if rollout.engine == "transformers" and rollout.tensor_parallel > 1:
        yield Problem(
            "rollout.tensor_parallel",
            str(rollout.tensor_parallel),
            "The transformers engine runs a whole model in one process.",
            "rollout.tensor_parallel: 1, or rollout.engine: vllm",
            conflict=True,
        )


def _sampling(config: PpoConfig) -> Iterator[Problem]:
    sampling = config.rollout.sampling
    if sampling.temperature == 0:
        yield Problem(
            "rollout.sampling.temperature",
            "0",
            "Greedy responses explore nothing, and their log-probs cannot be trained on.",
            "rollout.sampling.temperature: 1.0; 0 is for eval_sampling.temperature",
        )
    if sampling.top_p < 1:
        yield Problem(
            "rollout.sampling.top_p",
            str(sampling.top_p),
            "The trainer's log-probs are over the whole vocabulary; below 1 the sampler's are not, "
            "and the ratio between policies would be wrong.",
            "rollout.sampling.top_p: 1.0; below 1 is for eval_sampling.top_p",
        )
    if config.eval_sampling is not None and config.data.eval is None:
        yield Problem(
            "eval_sampling",
            show(config.eval_sampling.model_dump(mode="json", exclude_unset=True)),
            "There are no held-out prompts to answer: data.eval is not given.",
            "give data.eval.path and its columns, or leave eval_sampling out",
            conflict=True,
        )


def _kl(kl: KlConfig, *, reference_given: bool) -> Iterator[Problem]:
    if kl.place == "none" and reference_given:
        yield Problem(
            "reference",
            "given",
            "algorithm.kl.place: none loads no reference.",
            "algorithm.kl.place: reward or loss, or leave reference out",
            conflict=True,
        )
    if kl.place == "loss" and kl.estimator == "k1" and kl.coefficient > 0:
        yield Problem(
            "algorithm.kl.estimator",
            "k1",
            "In the loss, the gradient of k1 is zero on average: it would only add noise.",
            "algorithm.kl.estimator: k2 (its gradient is that of the KL) or k3",
            conflict=True,
        )
    if kl.target is not None and kl.place == "none":
        yield Problem(
            "algorithm.kl.target",
            str(kl.target),
            "algorithm.kl.place: none measures no KL to steer by.",
            "algorithm.kl.place: reward or loss, or leave algorithm.kl.target out",
            conflict=True,
        )
    elif kl.target is not None and kl.coefficient == 0:
        yield Problem(
            "algorithm.kl.target",
            str(kl.target),
            "The adaptive coefficient is multiplied at each step, so from 0 it stays 0.",
            "algorithm.kl.coefficient: 0.01, or leave algorithm.kl.target out",
            conflict=True,
        )


def _steps(config: PpoConfig) -> Iterator[Problem]:
    batch, algorithm = config.batch, config.algorithm
    sequences = batch.prompts * batch.responses
    if sequences % algorithm.mini_batches:
        divisors = [n for n in range(1, sequences + 1) if sequences % n == 0]
        nearest = min(divisors, key=lambda n: abs(n - algorithm.mini_batches))
        yield Problem(
            "algorithm.mini_batches",
            str(algorithm.mini_batches),
            f"It must divide the trajectories of a step, and batch.prompts * batch.responses = "
            f"{batch.prompts} * {batch.responses} = {sequences}.",
            f"algorithm.mini_batches: {nearest}, or other batch.prompts or batch.responses",
        )
    if algorithm.critic_warmup_steps >= config.run.steps:
        yield Problem(
            "algorithm.critic_warmup_steps",
            str(algorithm.critic_warmup_steps),
            f"The run has {config.run.steps} steps, so the actor would never be trained.",
            f"less than {config.run.steps}, or more run.steps",
        )
    if not any(part.weight for part in config.rewards.values()):
        yield Problem(
            "rewards",
            show({name: part.weight for name, part in config.rewards.items()}),
            "There is nothing to learn from: no reward, or none with a weight other than 0.",
            "an entry, such as `answer: {name: math_answer}`, with a weight",
        )


def _budget(config: JobConfig, longest: int, why: str) -> Iterator[Problem]:
    """longest: tokens of the longest sequence; why: the keys that make it so long."""
    if longest > config.batch.micro_batch_tokens:
        yield Problem(
            "batch.micro_batch_tokens",
            str(config.batch.micro_batch_tokens),
            f"A sequence may be {longest} tokens long ({why}) and would fit no micro-batch.",
            f"batch.micro_batch_tokens: {longest}, or shorter sequences",
            conflict=True,
        )
