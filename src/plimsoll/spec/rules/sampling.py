"""What must agree about sampling, rewards and the steps of reinforcement learning."""

from __future__ import annotations

from collections.abc import Iterator

from plimsoll.config.algorithm import KlConfig
from plimsoll.config.problems import Problem, Section, conflict, invalid, show
from plimsoll.config.rl import RlConfig
from plimsoll.config.rollout import SamplingConfig
from plimsoll.run.counting import counted
from plimsoll.spec.rules.adapters import separate, steady

_FIGURES = (
    *("reward", "finished", "response_tokens", "model", "seconds"),
    *("rows", "skipped_rows", "cut_rows"),
)
"""What an evaluation tells beside the parts of the reward, under the same `eval/` or in the same
`eval.json`."""


def sampled(config: RlConfig) -> Iterator[Problem]:
    """A job that samples what it learns from."""
    yield from steady("actor", config.actor)
    yield from steady("critic", config.critic)
    yield from separate(config)
    yield from _rollout(config)
    yield from _sampling(config)
    yield from _kl(config)
    yield from _steps(config)


def _rollout(config: RlConfig) -> Iterator[Problem]:
    at = Section("", config)
    rollout = config.rollout
    if config.cluster.where == "local" and rollout.engine == "vllm":
        why = "vLLM engines are Ray actors; cluster.where: local samples in this process."
        fix = "rollout.engine: transformers, or cluster.where: ray"
        yield at.conflict("rollout.engine", why, fix, "local-one-process")
    if config.cluster.where == "local" and rollout.engines > 1:
        why = "cluster.where: local samples in this one process."
        fix = "rollout.engines: 1, or cluster.where: ray"
        yield at.conflict("rollout.engines", why, fix, "local-one-process")
    if rollout.sleep_level > 0 and (rollout.engine, rollout.placement) != ("vllm", "shared"):
        why = "Only vLLM engines that share the ranks' cards have a reason to sleep; this is "
        why += f"rollout.engine: {rollout.engine}, rollout.placement: {rollout.placement}."
        fix = "rollout.sleep_level: 0, or rollout.engine: vllm with rollout.placement: shared"
        yield at.conflict("rollout.sleep_level", why, fix, "sleep-not-shared")
    if rollout.engine == "transformers" and rollout.tensor_parallel > 1:
        why = "The transformers engine runs a whole model in one process."
        fix = "rollout.tensor_parallel: 1, or rollout.engine: vllm"
        yield at.conflict("rollout.tensor_parallel", why, fix, "transformers-engine")
    if rollout.engine == "transformers" and config.batch.responses > rollout.max_sequences:
        why = "The transformers engine works on all responses to a prompt at once, and "
        why += f"batch.responses is {config.batch.responses}."
        fix = f"rollout.max_sequences: {config.batch.responses}, or fewer batch.responses, or "
        fix += "rollout.engine: vllm"
        yield at.conflict("rollout.max_sequences", why, fix, "transformers-engine")


def _sampling(config: RlConfig) -> Iterator[Problem]:
    at = Section("", config)
    sampling = config.rollout.sampling
    if sampling.temperature == 0:
        why = "Greedy responses explore nothing, and their log-probs cannot be trained on."
        fix = "rollout.sampling.temperature: 1.0; 0 is for eval_sampling.temperature"
        yield invalid("rollout.sampling.temperature", "0", why, fix, code="sampling-for-training")
    if sampling.top_p < 1:
        why = "The trainer's log-probs are over the whole vocabulary; below 1 the sampler's are "
        why += "not, and the ratio between policies would be wrong."
        fix = "rollout.sampling.top_p: 1.0; below 1 is for eval_sampling.top_p"
        yield at.invalid("rollout.sampling.top_p", why, fix, "sampling-for-training")
    yield from _stop("rollout.sampling", sampling)
    if config.eval_sampling is not None:
        yield from _stop("eval_sampling", config.eval_sampling)
    if config.eval_sampling is not None and config.data.eval is None:
        why = "There are no held-out prompts to answer: data.eval is not given."
        fix = "give data.eval.path and its columns, or leave eval_sampling out"
        given = show(config.eval_sampling.model_dump(mode="json", exclude_unset=True))
        yield conflict("eval_sampling", given, why, fix, code="no-eval-data")


def _stop(key: str, sampling: SamplingConfig) -> Iterator[Problem]:
    if "" in sampling.stop:
        why = "An empty string is in every response, from its first token on."
        fix = "only strings of a character or more; [] for none"
        yield invalid(f"{key}.stop", show(list(sampling.stop)), why, fix)


def _kl(config: RlConfig) -> Iterator[Problem]:
    at, kl = Section("", config), config.algorithm.kl
    if kl.place == "none" and config.reference is not None:
        why = "algorithm.kl.place: none loads no reference."
        fix = "algorithm.kl.place: reward or loss, or leave reference out"
        yield at.conflict("reference", why, fix, "kl-reference")
    if kl.place == "loss" and kl.estimator == "k1" and kl.coefficient > 0:
        why = "With algorithm.kl.place: loss, the gradient of k1 is zero on average: only noise."
        fix = "algorithm.kl.estimator: k2 (its gradient is that of the KL) or k3"
        yield at.conflict("algorithm.kl.estimator", why, fix, "kl-in-loss")
    if kl.target is not None and kl.place == "none":
        why = "algorithm.kl.place: none measures no KL to steer by."
        fix = "algorithm.kl.place: reward or loss, or leave algorithm.kl.target out"
        yield at.conflict("algorithm.kl.target", why, fix, "kl-target")
    elif kl.target is not None and kl.coefficient == 0:
        why = "The adaptive coefficient is multiplied at each step, so from 0 it stays 0."
        fix = "algorithm.kl.coefficient: 0.01, or leave algorithm.kl.target out"
        yield at.conflict("algorithm.kl.target", why, fix, "kl-target")
    yield from _unused_kl(Section("algorithm.kl", kl), kl)


def _unused_kl(at: Section, kl: KlConfig) -> Iterator[Problem]:
    """Keys that were set and would do nothing."""
    if kl.target is None and kl.horizon != KlConfig().horizon:
        why = "Without algorithm.kl.target the coefficient stays as it is."
        fix = "algorithm.kl.target: a KL per response, or leave algorithm.kl.horizon out"
        yield at.conflict("horizon", why, fix, "kl-unused")
    if kl.place != "none":
        return
    for name, value, idle in (
        ("coefficient", kl.coefficient, (KlConfig().coefficient, 0.0)),
        ("estimator", kl.estimator, (KlConfig().estimator,)),
    ):
        if value not in idle:
            why = "algorithm.kl.place: none keeps the policy near no reference."
            fix = f"algorithm.kl.place: reward or loss, or leave algorithm.kl.{name} out"
            yield at.conflict(name, why, fix, "kl-unused")


def _steps(config: RlConfig) -> Iterator[Problem]:
    at = Section("", config)
    batch, algorithm = config.batch, config.algorithm
    sequences = batch.prompts * batch.responses
    if sequences % algorithm.mini_batches:
        divisors = [n for n in range(1, sequences + 1) if sequences % n == 0]
        nearest = min(divisors, key=lambda n: abs(n - algorithm.mini_batches))
        why = "It must divide the trajectories of a step, and batch.prompts * batch.responses = "
        why += f"{batch.prompts} * {batch.responses} = {sequences}."
        fix = f"algorithm.mini_batches: {nearest}, or other batch.prompts or batch.responses"
        yield at.invalid("algorithm.mini_batches", why, fix, "mini-batches")
    steps = config.run.steps
    if steps is not None and algorithm.critic_warmup_steps >= steps:
        why = f"The run has {counted(steps, 'step')}, so the actor would never be "
        why += "trained."
        fix = f"less than {steps}, or more run.steps"
        yield at.invalid("algorithm.critic_warmup_steps", why, fix, "warmup-too-long")
    yield from _rewards(config)


def _rewards(config: RlConfig) -> Iterator[Problem]:
    weights = [part.weight for part in config.rewards.values()]
    if config.reward_model is not None:
        weights.append(config.reward_model.weight)
    if not any(weights):
        why = "There is nothing to learn from: no reward, or none with a weight other than 0."
        fix = "an entry, such as `answer: {name: math_answer}`, with a weight; or a reward_model"
        given = show({name: part.weight for name, part in config.rewards.items()})
        yield invalid("rewards", given, why, fix, code="no-reward")
    yield from _names(config)


def _names(config: RlConfig) -> Iterator[Problem]:
    taken = dict.fromkeys(_FIGURES, "Another figure of an evaluation has this name.")
    measured = ("reward", "reward_model", *config.rewards)
    taken |= dict.fromkeys(
        (f"{name}_{end}" for name in measured for end in ("low", "high")),
        "An end of the confidence interval of another figure of an evaluation has this name.",
    )
    if config.reward_model is not None:
        taken["reward_model"] = "The score of the reward model is shown under this name."
    for name in sorted(taken.keys() & config.rewards.keys()):
        fix = "another name for this part of the rewards"
        yield invalid(f"rewards.{name}", "given", taken[name], fix, code="reward-name")
