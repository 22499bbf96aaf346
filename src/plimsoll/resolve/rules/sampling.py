"""Rules about sampling, rewards and the steps of reinforcement learning."""

from __future__ import annotations

from collections.abc import Iterator
from difflib import get_close_matches

from plimsoll.config.data import EvalSource, set_name
from plimsoll.config.problems import Problem, Section, conflict, invalid, show
from plimsoll.config.rl import REWARD_MODEL, RlConfig, scoring_key
from plimsoll.config.rollout import SamplingConfig
from plimsoll.resolve.choices import advantage_needs
from plimsoll.resolve.decisions import sync_route
from plimsoll.resolve.engine_rules import other_engines, rollout_rules
from plimsoll.resolve.eval_sets import EvalSet, eval_sets
from plimsoll.resolve.rules.advantages import check_advantage, check_staleness
from plimsoll.resolve.rules.rewards import check_environments, reward_part
from plimsoll.resolve.rules.training import check_steadiness
from plimsoll.run.numbers import plural

_FIGURES = (
    *("reward", "finished", "response_tokens", "model", "seconds"),
    *("rows", "skipped_rows", "cut_rows"),
)
"""Names that a part of the reward cannot have: metrics of an evaluation (`eval/NAME`) and keys of
`eval.json`."""


def check_learning(config: RlConfig) -> Iterator[Problem]:
    """Yield problems of a job that learns from its own samples."""
    yield from check_steadiness("actor", config.actor)
    if config.critic is not None:
        yield from check_steadiness("critic", config.critic)
    yield from _replay(config) if config.rollout.replay else _engines(config)
    yield from _sampling(config)
    yield from check_staleness(config)
    yield from check_environments(config)
    yield from _eval_answers(config)
    yield from _kl(config)
    yield from _steps(config)
    yield from check_advantage(config)


def check_sampling(config: RlConfig) -> Iterator[Problem]:
    """Yield problems of a command that samples and does not learn (`plimsoll sample`).

    Settings of learning are not checked.
    """
    yield from _engines(config)
    yield from _sampling(config)
    yield from check_environments(config)
    yield from _rewards(config, teaches=False)
    at = Section("rollout", config.rollout)
    if config.rollout.replay is not None:
        why = "plimsoll sample learns nothing, and it samples by itself."
        fix = "leave rollout.replay out, or plimsoll rl"
        yield at.conflict("replay", why, fix, "replay-without-engines")
    if (sleep_key := config.rollout.engine.sleep_key) is not None:
        why = "plimsoll sample trains nothing that engines would make room for."
        key = f"{config.rollout.engine_name}.{sleep_key}"
        yield at.conflict(key, why, f"leave rollout.{key} out", "sleep-not-shared")
    if config.cluster.rank_sleep != "none":
        why, at = "plimsoll sample trains nothing that could sleep.", Section("", config)
        fix = "leave cluster.rank_sleep out"
        yield at.conflict("cluster.rank_sleep", why, fix, "sleep-not-shared")


def _engines(config: RlConfig) -> Iterator[Problem]:
    at, rollout = Section("", config), config.rollout
    rules = rollout_rules(rollout)
    if config.cluster.where not in rules.where:
        why = f"{rules.title} samples with cluster.where: {' or '.join(rules.where)} only."
        fix = f"{other_engines(rollout)}, or cluster.where: {rules.where[0]}"
        yield at.conflict(f"rollout.{rollout.engine_name}", why, fix, "local-one-process")
    if config.cluster.where == "local" and rollout.engines > 1:
        why = "cluster.where: local samples in this one process."
        fix = "rollout.engines: 1, or cluster.where: ray"
        yield at.conflict("rollout.engines", why, fix, "local-one-process")
    if rollout.routing == "sampled" and not rollout.engine.returns_routing:
        why = f"{rules.title} does not return the experts that it takes."
        fix = f"rollout.routing: live, or {other_engines(rollout)}"
        yield at.conflict("rollout.routing", why, fix, "sampled-routing")
    yield from _sync_route(config)


def _sync_route(config: RlConfig) -> Iterator[Problem]:
    """Yield the contradiction between the way of new weights and where ranks and engines are."""
    fastest, place = sync_route(config.cluster, config.rollout)
    route = config.rollout.sync.route
    if route in ("auto", "host", fastest):
        return
    needs = {
        "ipc": "By ipc an engine maps the memory of the card that it shares with a rank",
        "nccl": "By nccl a rank and the engines send from card to card, each on a card of its own",
    }
    at, why = Section("", config), f"{needs[route]}; here {place}."
    fix = f"rollout.sync.route: {fastest}, or auto"
    yield at.conflict("rollout.sync.route", why, fix, "sync-route")


def _sampling(config: RlConfig) -> Iterator[Problem]:
    sampling = config.rollout.sampling
    at = Section("rollout.sampling", sampling)
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
            yield at.invalid(name, why, fix, "sampling-for-training")
    of_sets = {f"{k}.sampling": one.sampling for k, one in config.data.eval_sources().items()}
    for key, own in {at.key: sampling, "eval_sampling": config.eval_sampling, **of_sets}.items():
        if own is not None:
            yield from _settings(Section(key, own), own)


def _settings(at: Section, sampling: SamplingConfig) -> Iterator[Problem]:
    """Yield problems of sampling settings, in training or on held-out prompts."""
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
    if kl is None:
        if config.reference is not None:
            why = "algorithm.kl: none loads no reference."
            fix = "algorithm.kl with a place, or leave reference out"
            yield at.conflict("reference", why, fix, "kl-reference")
        return
    plain = kl.estimator == "k1" and not kl.ratio_corrected
    if kl.place == "loss" and plain and kl.coefficient > 0:
        why = "With algorithm.kl.place: loss, the gradient of k1 is zero on average: only noise."
        fix = "algorithm.kl.estimator: k2 (its gradient is that of the KL) or k3, or "
        fix += "algorithm.kl.ratio_corrected: true"
        yield at.conflict("algorithm.kl.estimator", why, fix, "kl-in-loss")
    if kl.adaptive is not None and kl.coefficient == 0:
        why = "The adaptive coefficient is multiplied at each step, so from 0 it stays 0."
        fix = "algorithm.kl.coefficient: 0.01, or leave algorithm.kl.adaptive out"
        yield at.conflict("algorithm.kl.adaptive", why, fix, "kl-target")


def _steps(config: RlConfig) -> Iterator[Problem]:
    batch, algorithm = config.batch, config.algorithm
    at = Section("algorithm", algorithm)
    sequences = batch.prompts * batch.responses
    if sequences % algorithm.mini_batches:
        divisors = [n for n in range(1, sequences + 1) if sequences % n == 0]
        nearest = min(divisors, key=lambda n: abs(n - algorithm.mini_batches))
        why = "It must divide the trajectories of a step, and batch.prompts * batch.responses = "
        why += f"{batch.prompts} * {batch.responses} = {sequences}."
        fix = f"algorithm.mini_batches: {nearest}, or other batch.prompts or batch.responses"
        yield at.invalid("mini_batches", why, fix, "mini-batches")
    steps = config.run.steps
    if steps is not None and algorithm.critic_warmup_steps >= steps:
        why = f"The run has {plural(steps, 'step')}, so the actor would never be trained."
        fix = f"less than {steps}, or more run.steps"
        yield at.invalid("critic_warmup_steps", why, fix, "warmup-too-long")
    yield from _rewards(config)
    yield from _teacher(config)


def _teacher(config: RlConfig) -> Iterator[Problem]:
    """Yield problems of on-policy distillation."""
    at, algorithm = Section("", config), config.algorithm
    divergence = algorithm.distill_divergence
    if config.teacher is None:
        given = {
            "algorithm.distill_weight": algorithm.distill_weight != 1,
            "algorithm.distill_divergence": divergence is not None,
        }
        for key in (key for key, is_given in given.items() if is_given):
            why, fix = "There is no teacher to learn from.", f"a teacher, or leave {key} out"
            yield at.conflict(key, why, fix, "distillation")
        return
    if config.rollout.sampling.temperature != 1:
        why = "The teacher's distribution is the one at temperature 1; another would leave a gap "
        why += "that no learning closes."
        fix = "rollout.sampling.temperature: 1.0"
        yield at.conflict("rollout.sampling.temperature", why, fix, "distillation")
    if config.data.eval is not None and not config.parts:
        why = "Held-out answers are measured by rewards, and there are none."
        fix = "an entry of rewards (with weight: 0 it is a figure alone), or leave data.eval out"
        yield at.conflict("data.eval", why, fix, "distillation")
    dynamic = config.batch.dynamic_sampling
    if dynamic is not None and dynamic.by is None and not config.is_rewarded:
        why = "It looks for groups whose rewards differ, and no reward has a weight."
        fix = "leave batch.dynamic_sampling out, or give a reward a weight"
        yield at.conflict("batch.dynamic_sampling", why, fix, "distillation")
    if divergence is None:
        return
    if algorithm.distill_weight != 1:
        why = "The divergence is the only term of the loss, so a weight would do nothing but scale "
        why += "the gradient."
        fix = "leave algorithm.distill_weight out; actor.optimizer.learning_rate"
        yield at.conflict("algorithm.distill_weight", why, fix, "distillation")
    if config.is_rewarded:
        why = (
            "A divergence over the vocabulary replaces the policy loss, which learns from rewards."
        )
        fix = "algorithm.distill_divergence: null, or rewards with weight: 0"
        yield at.conflict("algorithm.distill_divergence", why, fix, "distillation")
    if algorithm.epochs * algorithm.mini_batches > 1:
        why = "The teacher's states are computed once a step, for a single update."
        fix = "algorithm.epochs: 1 and algorithm.mini_batches: 1"
        yield at.conflict("algorithm.distill_divergence", why, fix, "distillation")
    why = "The divergence is the whole loss, and this would not be in it."
    if algorithm.kl is not None:
        yield at.conflict("algorithm.kl", why, "algorithm.kl: none", "distillation")
    if algorithm.entropy_bonus > 0:
        fix = "algorithm.entropy_bonus: 0"
        yield at.conflict("algorithm.entropy_bonus", why, fix, "distillation")
    if "values_L" in advantage_needs(algorithm.advantage):
        fix = "an advantage without a critic, such as algorithm.advantage.name: reinforce"
        yield at.conflict("algorithm.advantage", why, fix, "distillation")


def _rewards(config: RlConfig, *, teaches: bool = True) -> Iterator[Problem]:
    """Yield problems of the rewards; `teaches` says whether a teacher may stand in for them."""
    if not config.is_rewarded and not (teaches and config.teacher is not None):
        why = "There is nothing to learn from: no reward, or none with a weight other than 0."
        fix = "an entry, such as `answer: {name: math_answer}`, with a weight; a reward_model; or "
        fix += "a teacher"
        given = show({name: part.weight for name, part in config.rewards.items()})
        yield invalid("rewards", given, why, fix, code="no-reward")
    yield from _scoring_models(config)
    for name, part in config.rewards.items():
        yield from reward_part(f"rewards.{name}", part)
    yield from _names(config)


def _scoring_models(config: RlConfig) -> Iterator[Problem]:
    """Yield a problem for each setting of a reward model that nothing would read."""
    for name, model in config.scoring_models.items():
        key = scoring_key(name)
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
    passing = (name for eval_set in eval_sets(config) for name in eval_set.passing)
    taken |= dict.fromkeys(passing, "A figure of held-out prompts has this name.")
    why_taken = "The score of a reward model is shown under this name."
    taken |= dict.fromkeys(config.scoring_models, why_taken)
    for name in sorted(taken.keys() & config.rewards.keys()):
        fix = "another name for this part of the rewards"
        yield invalid(f"rewards.{name}", "given", taken[name], fix, code="reward-name")


def _eval_answers(config: RlConfig) -> Iterator[Problem]:
    """Yield problems of the sets of held-out prompts: sampling, names, and the rule for passing."""
    sets = eval_sets(config)
    for eval_set, source in zip(sets, config.data.eval_sources().values(), strict=True):
        at, name = Section(eval_set.key, source), set_name(eval_set.key)
        yield from _responses(at, eval_set)
        yield from _passing(at, source, config)
        if "/" in name:
            why = "In the names of figures `/` stands between a set, a source and what is told of "
            why += "them."
            fix = f"another name, such as {name.replace('/', '_')}"
            yield invalid(eval_set.key, "given", why, fix)
    if config.eval_sampling is None or any(s.sampling_key == "eval_sampling" for s in sets):
        return
    why = "There are no held-out prompts to answer: data.eval is not given."
    fix = "give data.eval.path and its columns, or leave eval_sampling out"
    if sets:
        why = "Nothing reads it: each set of data.eval has a sampling of its own."
        fix = "leave eval_sampling out, or the sampling of a set"
    given = show(config.eval_sampling.model_dump(mode="json", exclude_unset=True))
    yield conflict("eval_sampling", given, why, fix, code="no-eval-data")


def _responses(at: Section, eval_set: EvalSet) -> Iterator[Problem]:
    if eval_set.responses > 1 and eval_set.sampling.temperature == 0:
        why = "Greedy responses to a prompt are all the same "
        why += f"({eval_set.sampling_key}.temperature: 0)."
        fix = f"{eval_set.key}.responses: 1, or {eval_set.key}.sampling with a temperature above 0"
        yield at.conflict("responses", why, fix, "sampling-contradicts")


def _passing(at: Section, source: EvalSource, config: RlConfig) -> Iterator[Problem]:
    parts = config.parts
    if source.pass_by is not None and source.pass_by not in parts:
        close = get_close_matches(source.pass_by, parts, n=1)
        fix = f"did you mean {close[0]}?" if close else f"one of {', '.join(parts)}"
        yield at.invalid("pass_by", "It is no part of the reward.", fix, "reward-name")
    if (
        source.pass_threshold is not None
        and source.pass_by is None
        and not (config.rewards or config.environments)
    ):
        why = f"{at.key}.pass_by does not say which reward model it is of."
        fix = f"{at.key}.pass_by: one of {', '.join(parts)}"
        yield at.conflict("pass_threshold", why, fix, "reward-name")


def _replay(config: RlConfig) -> Iterator[Problem]:
    """Yield a problem for each setting that needs engines, as a replay starts none."""
    at = Section("", config)
    if config.run.eval_every is not None:
        why = "A replay (rollout.replay) starts no engine that could answer held-out prompts."
        fix = "run.eval_every: null, and `plimsoll eval` of the run afterwards"
        yield at.conflict("run.eval_every", why, fix, "replay-without-engines")
    if "greedy_S" in advantage_needs(config.algorithm.advantage):
        why = "It compares with greedy responses, which are not among the trajectories of a run "
        why += "(rollout.replay)."
        fix = "another advantage, such as rloo, or leave rollout.replay out"
        yield at.conflict("algorithm.advantage", why, fix, "replay-without-engines")
