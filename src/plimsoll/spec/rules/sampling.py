"""What must agree about sampling, rewards and the steps of reinforcement learning."""

from __future__ import annotations

from collections.abc import Iterator

from plimsoll.config.algorithm import KlConfig
from plimsoll.config.problems import Problem, conflict, invalid, show
from plimsoll.config.rl import PpoConfig
from plimsoll.config.rollout import SamplingConfig
from plimsoll.run.counting import counted
from plimsoll.spec.rules.adapters import separate, steady

_FIGURES = (
    *("reward", "finished", "response_tokens", "model", "seconds"),
    *("rows", "skipped_rows", "cut_rows"),
)
"""What an evaluation tells beside the parts of the reward, under the same `eval/` or in the same
`eval.json`."""


def sampled(config: PpoConfig) -> Iterator[Problem]:
    """A job that samples what it learns from."""
    yield from steady("actor", config.actor)
    yield from steady("critic", config.critic)
    yield from separate(config)
    yield from _rollout(config)
    yield from _sampling(config)
    yield from _kl(config.algorithm.kl, reference_given=config.reference is not None)
    yield from _steps(config)


def _rollout(config: PpoConfig) -> Iterator[Problem]:
    rollout = config.rollout
    if config.cluster.where == "local" and rollout.engine == "vllm":
        yield conflict(
            "rollout.engine",
            "vllm",
            "vLLM engines are Ray actors; cluster.where: local samples in this process.",
            "rollout.engine: transformers, or cluster.where: ray",
            code="local-one-process",
        )
    if config.cluster.where == "local" and rollout.engines > 1:
        yield conflict(
            "rollout.engines",
            str(rollout.engines),
            "cluster.where: local samples in this one process.",
            "rollout.engines: 1, or cluster.where: ray",
            code="local-one-process",
        )
    if rollout.sleep_level > 0 and (rollout.engine, rollout.placement) != ("vllm", "shared"):
        yield conflict(
            "rollout.sleep_level",
            str(rollout.sleep_level),
            "Only vLLM engines that share the ranks' cards have a reason to sleep; this is "
            f"rollout.engine: {rollout.engine}, rollout.placement: {rollout.placement}.",
            "rollout.sleep_level: 0, or rollout.engine: vllm with rollout.placement: shared",
            code="sleep-not-shared",
        )
    if rollout.engine == "transformers" and rollout.tensor_parallel > 1:
        yield conflict(
            "rollout.tensor_parallel",
            str(rollout.tensor_parallel),
            "The transformers engine runs a whole model in one process.",
            "rollout.tensor_parallel: 1, or rollout.engine: vllm",
            code="transformers-engine",
        )
    if rollout.engine == "transformers" and config.batch.responses > rollout.max_sequences:
        yield conflict(
            "rollout.max_sequences",
            str(rollout.max_sequences),
            "The transformers engine works on all responses to a prompt at once, and "
            f"batch.responses is {config.batch.responses}.",
            f"rollout.max_sequences: {config.batch.responses}, or fewer batch.responses, or "
            "rollout.engine: vllm",
            code="transformers-engine",
        )


def _sampling(config: PpoConfig) -> Iterator[Problem]:
    sampling = config.rollout.sampling
    if sampling.temperature == 0:
        yield invalid(
            "rollout.sampling.temperature",
            "0",
            "Greedy responses explore nothing, and their log-probs cannot be trained on.",
            "rollout.sampling.temperature: 1.0; 0 is for eval_sampling.temperature",
            code="sampling-for-training",
        )
    if sampling.top_p < 1:
        yield invalid(
            "rollout.sampling.top_p",
            str(sampling.top_p),
            "The trainer's log-probs are over the whole vocabulary; below 1 the sampler's are not, "
            "and the ratio between policies would be wrong.",
            "rollout.sampling.top_p: 1.0; below 1 is for eval_sampling.top_p",
            code="sampling-for-training",
        )
    yield from _stop("rollout.sampling", sampling)
    if config.eval_sampling is not None:
        yield from _stop("eval_sampling", config.eval_sampling)
    if config.eval_sampling is not None and config.data.eval is None:
        yield conflict(
            "eval_sampling",
            show(config.eval_sampling.model_dump(mode="json", exclude_unset=True)),
            "There are no held-out prompts to answer: data.eval is not given.",
            "give data.eval.path and its columns, or leave eval_sampling out",
            code="no-eval-data",
        )


def _stop(key: str, sampling: SamplingConfig) -> Iterator[Problem]:
    if "" in sampling.stop:
        yield invalid(
            f"{key}.stop",
            show(list(sampling.stop)),
            "An empty string is in every response, from its first token on.",
            "only strings of a character or more; [] for none",
        )


def _kl(kl: KlConfig, *, reference_given: bool) -> Iterator[Problem]:
    if kl.place == "none" and reference_given:
        yield conflict(
            "reference",
            "given",
            "algorithm.kl.place: none loads no reference.",
            "algorithm.kl.place: reward or loss, or leave reference out",
            code="kl-reference",
        )
    if kl.place == "loss" and kl.estimator == "k1" and kl.coefficient > 0:
        yield conflict(
            "algorithm.kl.estimator",
            "k1",
            "With algorithm.kl.place: loss, the gradient of k1 is zero on average: only noise.",
            "algorithm.kl.estimator: k2 (its gradient is that of the KL) or k3",
            code="kl-in-loss",
        )
    if kl.target is not None and kl.place == "none":
        yield conflict(
            "algorithm.kl.target",
            str(kl.target),
            "algorithm.kl.place: none measures no KL to steer by.",
            "algorithm.kl.place: reward or loss, or leave algorithm.kl.target out",
            code="kl-target",
        )
    elif kl.target is not None and kl.coefficient == 0:
        yield conflict(
            "algorithm.kl.target",
            str(kl.target),
            "The adaptive coefficient is multiplied at each step, so from 0 it stays 0.",
            "algorithm.kl.coefficient: 0.01, or leave algorithm.kl.target out",
            code="kl-target",
        )
    yield from _unused_kl(kl)


def _unused_kl(kl: KlConfig) -> Iterator[Problem]:
    """Keys that were set and would do nothing."""
    if kl.target is None and kl.horizon != KlConfig().horizon:
        yield conflict(
            "algorithm.kl.horizon",
            str(kl.horizon),
            "Without algorithm.kl.target the coefficient stays as it is.",
            "algorithm.kl.target: a KL per response, or leave algorithm.kl.horizon out",
            code="kl-unused",
        )
    if kl.place != "none":
        return
    for name, value, idle in (
        ("coefficient", kl.coefficient, (KlConfig().coefficient, 0.0)),
        ("estimator", kl.estimator, (KlConfig().estimator,)),
    ):
        if value not in idle:
            yield conflict(
                f"algorithm.kl.{name}",
                str(value),
                "algorithm.kl.place: none keeps the policy near no reference.",
                f"algorithm.kl.place: reward or loss, or leave algorithm.kl.{name} out",
                code="kl-unused",
            )


def _steps(config: PpoConfig) -> Iterator[Problem]:
    batch, algorithm = config.batch, config.algorithm
    sequences = batch.prompts * batch.responses
    if sequences % algorithm.mini_batches:
        divisors = [n for n in range(1, sequences + 1) if sequences % n == 0]
        nearest = min(divisors, key=lambda n: abs(n - algorithm.mini_batches))
        yield invalid(
            "algorithm.mini_batches",
            str(algorithm.mini_batches),
            f"It must divide the trajectories of a step, and batch.prompts * batch.responses = "
            f"{batch.prompts} * {batch.responses} = {sequences}.",
            f"algorithm.mini_batches: {nearest}, or other batch.prompts or batch.responses",
            code="mini-batches",
        )
    if algorithm.critic_warmup_steps >= config.run.steps:
        yield invalid(
            "algorithm.critic_warmup_steps",
            str(algorithm.critic_warmup_steps),
            f"The run has {counted(config.run.steps, 'step')}, so the actor would never be "
            "trained.",
            f"less than {config.run.steps}, or more run.steps",
            code="warmup-too-long",
        )
    yield from _rewards(config)


def _rewards(config: PpoConfig) -> Iterator[Problem]:
    weights = [part.weight for part in config.rewards.values()]
    if config.reward_model is not None:
        weights.append(config.reward_model.weight)
    if not any(weights):
        yield invalid(
            "rewards",
            show({name: part.weight for name, part in config.rewards.items()}),
            "There is nothing to learn from: no reward, or none with a weight other than 0.",
            "an entry, such as `answer: {name: math_answer}`, with a weight; or a reward_model",
            code="no-reward",
        )
    yield from _names(config)


def _names(config: PpoConfig) -> Iterator[Problem]:
    taken = dict.fromkeys(_FIGURES, "Another figure of an evaluation has this name.")
    measured = ("reward", "reward_model", *config.rewards)
    taken |= dict.fromkeys(
        (f"{name}_{end}" for name in measured for end in ("low", "high")),
        "An end of the confidence interval of another figure of an evaluation has this name.",
    )
    if config.reward_model is not None:
        taken["reward_model"] = "The score of the reward model is shown under this name."
    for name in sorted(taken.keys() & config.rewards.keys()):
        yield invalid(
            f"rewards.{name}",
            "given",
            taken[name],
            "another name for this part of the rewards",
            code="reward-name",
        )
