"""What must agree about sampling, rewards and the steps of reinforcement learning."""

from __future__ import annotations

from collections.abc import Iterator

from plimsoll.config.algorithm import KlConfig
from plimsoll.config.problems import Problem, Section, invalid, show
from plimsoll.config.rl import REWARD_MODEL, RlConfig
from plimsoll.config.rollout import SamplingConfig
from plimsoll.run.counting import counted
from plimsoll.spec.eval_sets import eval_sets
from plimsoll.spec.rules.adapters import separate, steady
from plimsoll.spec.rules.advantages import estimated
from plimsoll.spec.rules.environments import played
from plimsoll.spec.rules.eval_sets import answered
from plimsoll.spec.rules.replay import replayed, without_learning
from plimsoll.spec.rules.rewards import reward_part
from plimsoll.spec.rules.vllm_arguments import check_arguments

_FIGURES = (
    *("reward", "finished", "response_tokens", "model", "seconds"),
    *("rows", "skipped_rows", "cut_rows"),
)
"""What an evaluation tells beside the parts of the reward, under the same `eval/` or in the same
`eval.json`."""


def sampled(config: RlConfig) -> Iterator[Problem]:
    """A job that samples what it learns from."""
    yield from steady("actor", config.actor)
    if config.critic is not None:
        yield from steady("critic", config.critic)
    yield from replayed(config) if config.rollout.replay else _engines(config)
    yield from _sampling(config)
    yield from played(config)
    yield from answered(config)
    yield from _kl(config)
    yield from _steps(config)
    yield from estimated(config)


def only_sampled(config: RlConfig) -> Iterator[Problem]:
    """A job that samples and does not learn: what it would learn by is not looked at."""
    yield from _engines(config)
    yield from _sampling(config)
    yield from played(config)
    yield from _rewards(config)
    yield from without_learning(config)


def _engines(config: RlConfig) -> Iterator[Problem]:
    yield from separate(config)
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
    yield from check_arguments(rollout)
    if rollout.engine == "transformers" and rollout.vllm:
        why = "The transformers engine has no part of vLLM."
        fix = "leave rollout.vllm out, or rollout.engine: vllm"
        yield at.conflict("rollout.vllm", why, fix, "transformers-engine")
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
    for name, cuts, free in (
        ("top_p", sampling.top_p < 1, "1.0; below 1"),
        ("top_k", sampling.top_k > 0, "0; another number"),
        ("min_p", sampling.min_p > 0, "0; above 0"),
    ):
        if cuts:
            why = "The trainer's log-probs are over the whole vocabulary; with this the sampler's "
            why += "are not, and the ratio between policies would be wrong."
            fix = f"rollout.sampling.{name}: {free} is for eval_sampling.{name}"
            yield at.invalid(f"rollout.sampling.{name}", why, fix, "sampling-for-training")
    yield from _settings(Section("rollout.sampling", sampling), sampling)
    if config.eval_sampling is not None:
        yield from _settings(Section("eval_sampling", config.eval_sampling), config.eval_sampling)
    for key, source in config.data.eval_sources().items():
        if source.sampling is not None:
            yield from _settings(Section(f"{key}.sampling", source.sampling), source.sampling)


def _settings(at: Section, sampling: SamplingConfig) -> Iterator[Problem]:
    """Of a sampler, whatever it samples for."""
    if "" in sampling.stop:
        why = "An empty string is in every response, from its first token on."
        fix = "only strings of a character or more; [] for none"
        yield invalid(f"{at.key}.stop", show(list(sampling.stop)), why, fix)
    if sampling.min_new_tokens > sampling.max_new_tokens:
        why = f"{at.key}.max_new_tokens ends every response after {sampling.max_new_tokens}."
        fix = f"at most {sampling.max_new_tokens}, or more {at.key}.max_new_tokens"
        yield at.conflict("min_new_tokens", why, fix, "sampling-contradicts")
    for name in ("top_k", "min_p"):
        if sampling.temperature == 0 and getattr(sampling, name) > 0:
            why = f"{at.key}.temperature: 0 takes the most likely token, whatever others are left."
            fix = f"{at.key}.{name}: 0, or a {at.key}.temperature above 0"
            yield at.conflict(name, why, fix, "sampling-contradicts")


def _kl(config: RlConfig) -> Iterator[Problem]:
    at, kl = Section("", config), config.algorithm.kl
    if kl.place == "none" and config.reference is not None:
        why = "algorithm.kl.place: none loads no reference."
        fix = "algorithm.kl.place: reward or loss, or leave reference out"
        yield at.conflict("reference", why, fix, "kl-reference")
    plain = kl.estimator == "k1" and not kl.ratio_corrected
    if kl.place == "loss" and plain and kl.coefficient > 0:
        why = "With algorithm.kl.place: loss, the gradient of k1 is zero on average: only noise."
        fix = "algorithm.kl.estimator: k2 (its gradient is that of the KL) or k3, or "
        fix += "algorithm.kl.ratio_corrected: true"
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
    weights += [model.weight for model in config.scoring_models.values()]
    if not any(weights) and not config.environments:
        why = "There is nothing to learn from: no reward, or none with a weight other than 0."
        fix = "an entry, such as `answer: {name: math_answer}`, with a weight; or a reward_model"
        given = show({name: part.weight for name, part in config.rewards.items()})
        yield invalid("rewards", given, why, fix, code="no-reward")
    yield from _scoring_models(config)
    for name, part in config.rewards.items():
        yield from reward_part(f"rewards.{name}", part)
    yield from _names(config)


def _scoring_models(config: RlConfig) -> Iterator[Problem]:
    """Settings of reward models that nothing would read."""
    for name, model in config.scoring_models.items():
        key = name if name == REWARD_MODEL else f"reward_models.{name}"
        at = Section(key, model)
        if model.tokenizer == "own":
            continue
        if model.steps is not None:
            why = "Steps are found in the text of a response, which its own tokenizer then reads."
            yield at.conflict("steps", why, f"{key}.tokenizer: own", "reward-tokenizer")
        for setting in ("chat_template", "max_tokens"):
            if getattr(model, setting) is not None:
                why = f"{key}.tokenizer: actor has the model read the actor's tokens as they are."
                fix = f"{key}.tokenizer: own, or leave {key}.{setting} out"
                yield at.conflict(setting, why, fix, "reward-tokenizer")


def _names(config: RlConfig) -> Iterator[Problem]:
    taken = dict.fromkeys(_FIGURES, "Another figure of an evaluation has this name.")
    measured = ("reward", REWARD_MODEL, *config.rewards, *config.reward_models)
    taken |= dict.fromkeys(
        (f"{name}_{end}" for name in measured for end in ("low", "high")),
        "An end of the confidence interval of another figure of an evaluation has this name.",
    )
    passing = (name for one in eval_sets(config) for name in one.passing)
    taken |= dict.fromkeys(passing, "A figure of held-out prompts has this name.")
    shown = "The score of a reward model is shown under this name."
    taken |= dict.fromkeys(config.scoring_models, shown)
    for name in sorted(taken.keys() & config.rewards.keys()):
        fix = "another name for this part of the rewards"
        yield invalid(f"rewards.{name}", "given", taken[name], fix, code="reward-name")
