"""A step's scores and advantages: every number lands at its own trajectory, and by hand."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from plimsoll.cluster.protocol import Cluster, Pending, group_of
from plimsoll.config.rl import RlConfig
from plimsoll.jobs.rl_loop import explained_variance, next_kl_coefficient
from plimsoll.jobs.which import spec_of
from plimsoll.records import (
    ADVANTAGES,
    COLUMNS,
    REFERENCE_LOGPROBS,
    RETURNS,
    SAMPLER_LOGPROBS,
    TEACHER_LOGPROBS,
    TOKEN_REWARDS,
    TRAINER_LOGPROBS,
    VALUES,
    Column,
    Entries,
    Floats,
    Pack,
    Prompt,
    RewardPart,
    Trajectory,
    Turn,
    cut,
    single_turn,
)
from plimsoll.resolve.run_spec import RunSpec
from plimsoll.rl.batch import (
    Batch,
    batch_metrics,
    episode_metrics,
    estimate_advantages,
    observed_kl,
    observed_kl_per_token,
    pack_batch,
    policy_columns,
    policy_logprobs,
    score_batch,
    token_count,
    with_columns,
    zero_signal,
)
from plimsoll.rl.layout import MiniBatch
from plimsoll.run.state import RunState

LENGTHS = [(3, 4), (1, 7), (5, 1), (2, 2), (9, 9), (4, 3), (1, 1), (6, 5)]
"""Prompt and response tokens of each trajectory."""


def config(
    seed: int = 5, *, critic: bool = True, share_prompts: bool = False, **algorithm: Any
) -> RunSpec[RlConfig]:
    if critic:
        advantage = algorithm.get("advantage", {"name": "gae"})
        options = {"whiten": False, **advantage.get("options", {})}
        algorithm["advantage"] = {**advantage, "options": options}
    found = RlConfig.model_validate(
        {
            "run": {"directory": "runs/x", "steps": 2, "seed": seed},
            "data": {"train": {"path": "x.jsonl", "prompt": "p"}},
            "batch": {
                "prompts": 4,
                "responses": 2,
                "micro_batch_tokens": 20,
                "share_prompts": share_prompts,
            },
            "actor": {"model": {"path": "m"}},
            "critic": {"model": {"path": "m"}} if critic else None,
            "rewards": {"length": {"name": "length"}},
            "algorithm": algorithm,
        }
    )
    return spec_of(found)


def floats(*values: float) -> Floats:
    return np.array(values, dtype=np.float32)


def trajectory(index: int, prompt: int, response: int) -> Trajectory:
    """Its response tokens are 1000 * index, 1000 * index + 1, ...; its log-probs are a 1000th."""
    tokens = 1000 * index + np.arange(response)
    return single_turn(
        prompt=Prompt(index, np.full(prompt, 7), f"prompt {index}"),
        sample_index=0,
        response_tokens=tokens,
        sampler_logprobs=(-tokens / 1000).astype(np.float32),
        response_text="",
        finish_reason="stop" if index % 2 else "length",
        weight_version=0,
        rewards=(RewardPart("length", float(index), weight=2.0),),
        group=index,
    )


def trajectories(lengths: Sequence[tuple[int, int]] = LENGTHS) -> list[Trajectory]:
    return [trajectory(i, *length) for i, length in enumerate(lengths)]


SHIFT = {"actor": 0.0, "reference": 0.25, "critic": 0.5}


@dataclass
class PlainCluster:
    """Scores a learned token with a thousandth of its number, less what the role is shifted by."""

    streams: int
    critic_ranks: int | None = None
    asked: list[tuple[str, str]] = field(default_factory=list)

    @property
    def own_groups(self) -> dict[str, PlainCluster]:
        if self.critic_ranks is None:
            return {}
        return {"critic": PlainCluster(self.critic_ranks, asked=self.asked)}

    def call(
        self, task: Callable[..., Any], per_stream: Iterable[tuple[object, ...]]
    ) -> Pending[Any]:
        answers = []
        for role, *minis in cast("Iterable[tuple[str, list[Pack]]]", per_stream):
            packs = chain(*minis)
            answers.append([-p.targets_L.astype(np.float32) / 1000 - SHIFT[role] for p in packs])
            self.asked.append((task.__name__, role))
        return Pending(lambda: answers)


def scores_of(
    settings: RunSpec[RlConfig], cluster: PlainCluster, found: Sequence[Trajectory]
) -> tuple[Batch, dict[Column, Entries]]:
    served = cast(Cluster, cluster)
    critic = settings.roles.get("critic")
    critics = (group_of(served, critic) if critic else served).streams
    batch = pack_batch(list(found), settings, cluster.streams, critics, step=1)
    return batch, score_batch(batch, settings, served)


def packs_of(minis: Sequence[MiniBatch]) -> list[Pack]:
    return [p for mini in minis for p in chain.from_iterable(mini.packs)]


@given(
    lengths=st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), min_size=6, max_size=6),
    mini_batches=st.sampled_from([1, 2, 3, 6]),
    ranks=st.integers(1, 4),
    critic_ranks=st.none() | st.integers(1, 4),
    seed=st.integers(0, 1000),
)
def test_scores_land_at_their_trajectory(
    lengths: list[tuple[int, int]],
    mini_batches: int,
    ranks: int,
    critic_ranks: int | None,
    seed: int,
) -> None:
    settings = config(seed, mini_batches=mini_batches, epochs=2)
    found = trajectories(lengths)
    cluster = PlainCluster(ranks, critic_ranks)
    _, scores = scores_of(settings, cluster, found)
    columns = (SAMPLER_LOGPROBS, TRAINER_LOGPROBS, REFERENCE_LOGPROBS, VALUES)
    found_by = zip(*(scores[column] for column in columns), strict=True)
    for t, (sampler, old, reference, values) in zip(found, found_by, strict=True):
        expected = -t.response_tokens / np.float32(1000)
        np.testing.assert_array_equal(sampler, t.sampler_logprobs)
        np.testing.assert_allclose(old, expected, rtol=1e-6)
        np.testing.assert_allclose(reference, expected - 0.25, rtol=1e-6)
        np.testing.assert_allclose(values, expected - 0.5, rtol=1e-6)


@pytest.mark.parametrize(("ranks", "critic_ranks"), [(1, None), (3, None), (2, 3)])
def test_columns_lie_beside_the_tokens_that_they_belong_to(
    ranks: int, critic_ranks: int | None
) -> None:
    settings = config(mini_batches=2)
    found = trajectories()
    cluster = PlainCluster(ranks, critic_ranks)
    batch, scores = scores_of(settings, cluster, found)
    columns = {**scores, ADVANTAGES: [t.response_tokens.astype(np.float32) for t in found]}
    for p in packs_of(batch.minis):
        policy = cut(policy_columns(columns, kl_loss=True), p)
        assert policy.keys() == {c for c in COLUMNS.values() if c.in_policy_loss}
        old, reference = policy[TRAINER_LOGPROBS], policy[REFERENCE_LOGPROBS]
        np.testing.assert_array_equal(policy[ADVANTAGES], p.targets_L)
        np.testing.assert_allclose(policy[SAMPLER_LOGPROBS], -p.targets_L / 1000, rtol=1e-6)
        np.testing.assert_allclose(old, -p.targets_L / 1000, rtol=1e-6)
        np.testing.assert_allclose(reference, old - 0.25, rtol=1e-6)
    for p in packs_of(batch.critic_minis):
        values = VALUES.cut(scores[VALUES], p)
        np.testing.assert_allclose(values, -p.targets_L / 1000 - 0.5, rtol=1e-6)


def test_a_step_with_one_update_does_not_score_the_policy_again() -> None:
    cluster = PlainCluster(streams=2)
    found = trajectories()
    _, scores = scores_of(config(), cluster, found)
    assert set(cluster.asked) == {("log_probs", "reference"), ("values", "critic")}
    assert TRAINER_LOGPROBS not in scores
    own = policy_logprobs(scores)
    assert all(np.array_equal(s, t.sampler_logprobs) for s, t in zip(own, found, strict=True))
    assert policy_columns(scores, kl_loss=False).keys() == {SAMPLER_LOGPROBS}


@pytest.mark.parametrize("settings", [config(epochs=2), config(mini_batches=2)])
def test_a_step_with_several_updates_does(settings: RunSpec[RlConfig]) -> None:
    cluster = PlainCluster(streams=1)
    _, scores = scores_of(settings, cluster, trajectories())
    assert ("log_probs", "actor") in cluster.asked
    assert policy_logprobs(scores) is scores[TRAINER_LOGPROBS]


def test_without_a_kl_no_reference_is_asked() -> None:
    cluster = PlainCluster(streams=1)
    settings = config(kl="none")
    batch, scores = scores_of(settings, cluster, trajectories())
    assert cluster.asked == [("values", "critic")] and REFERENCE_LOGPROBS not in scores
    assert "kl" not in batch_metrics(batch, scores, 0.1)


def test_an_advantage_that_takes_no_values_asks_no_critic() -> None:
    cluster = PlainCluster(streams=1)
    settings = config(critic=False, advantage={"name": "reinforce"})
    batch, scores = scores_of(settings, cluster, trajectories())
    assert cluster.asked == [("log_probs", "reference")] and VALUES not in scores
    estimated = estimate_advantages(batch, scores, settings.config.algorithm, 0.0, {})
    assert estimated.keys() == {ADVANTAGES}


def test_every_epoch_goes_over_all_mini_batches_in_an_order_of_its_own() -> None:
    settings = config(mini_batches=8, epochs=3)

    def order(step: int) -> list[int]:
        batch = pack_batch(trajectories(), settings, 1, 1, step)
        schedule = list(batch.schedule(batch.minis, 3))
        assert [update for update, _ in schedule] == list(range(24))
        return [int(mini.packs[0][0].samples_S[0]) for _, mini in schedule]

    epochs = [order(1)[i : i + 8] for i in (0, 8, 16)]
    assert all(sorted(epoch) == list(range(8)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]
    assert order(1) == order(1) != order(2)


def test_counts_are_of_the_whole_mini_batch() -> None:
    found = trajectories()
    settings = config(mini_batches=2, critic_mini_batches=4)
    batch = pack_batch(found, settings, ranks=2, critic_ranks=3, step=1)
    for minis, ranks, count in ((batch.minis, 2, 2), (batch.critic_minis, 3, 4)):
        assert len(minis) == count
        for mini in minis:
            assert len(mini.packs) == ranks and mini.counts.sequences == 8 // count
            packs = list(chain.from_iterable(mini.packs))
            assert mini.counts.tokens == sum(p.loss_tokens for p in packs)
        total = sum(len(t.response_tokens) for t in found)
        assert sum(mini.counts.tokens for mini in minis) == total
    assert token_count(batch.episodes) == sum(map(sum, LENGTHS))
    alike = pack_batch(found, config(mini_batches=2), ranks=2, critic_ranks=2, step=1)
    assert alike.critic_minis is alike.minis


GIVEN_VALUES = [floats(1.0, 0.5), floats(4.0)]
"""Of the critic, for the two."""


def two_trajectories(settings: RunSpec[RlConfig]) -> tuple[Batch, dict[Column, Entries]]:
    """Responses of 2 and 1 tokens with the rewards 0 and 2 (1 times its weight)."""
    batch = pack_batch(trajectories([(1, 2), (1, 1)]), settings, 1, 1, step=1)
    scores: dict[Column, Entries] = {
        SAMPLER_LOGPROBS: [floats(-1.0, -2.5), floats(-0.5)],
        TRAINER_LOGPROBS: [floats(-1.0, -2.0), floats(-0.5)],
        REFERENCE_LOGPROBS: [floats(-1.5, -1.0), floats(-1.0)],
        VALUES: GIVEN_VALUES,
    }
    return batch, scores


def test_advantages_by_hand() -> None:
    options = {"name": "gae", "options": {"gamma": 1.0, "gae_lambda": 0.5}}
    settings = config(advantage=options, kl={"coefficient": 0.1})
    batch, scores = two_trajectories(settings)
    learnables = estimate_advantages(batch, scores, settings.config.algorithm, 0.1, {})
    # k1 is policy - reference: 0.5, -1, 0.5; rewards -0.05, 0.1 + 0 and 2 - 0.05.
    # First: delta 0.1 - 0.5 = -0.4 at the end, before it -0.05 + 0.5 - 1 + 0.5 * -0.4 = -0.75.
    # Second: 1.95 - 4 = -2.05.
    advantages = learnables[ADVANTAGES]
    np.testing.assert_allclose(np.concatenate(advantages), [-0.75, -0.4, -2.05], atol=1e-6)
    returns = learnables[RETURNS]
    np.testing.assert_allclose(np.concatenate(returns), [0.25, 0.1, 1.95], atol=1e-6)
    means = [float(own.mean()) for own in learnables[ADVANTAGES]]
    assert means == pytest.approx([-0.575, -2.05])


def test_a_teacher_adds_its_log_probs_less_the_policys_times_the_weight() -> None:
    """Each token has its own: what follows it does not count. By the old policy, if it is known."""
    settings = config(critic=False, advantage={"name": "reinforce"}, distill_weight=0.5)
    batch, scores = two_trajectories(settings)
    scores[TEACHER_LOGPROBS] = [floats(-1.5, -1.0), floats(-0.5)]
    unscored = {c: entries for c, entries in scores.items() if c != TRAINER_LOGPROBS}
    for known, expected in (
        (scores, [-0.25, 0.5, 2.0]),  # -1.5 + 1, -1 + 2 and 0; the second's reward is 2
        (unscored, [-0.25, 0.75, 2.0]),  # the sampler's second token has -2.5
    ):
        learnables = estimate_advantages(batch, known, settings.config.algorithm, 0.0, {})
        found = np.concatenate(learnables[ADVANTAGES])
        np.testing.assert_allclose(found, expected, atol=1e-6)
    metrics = batch_metrics(batch, scores, 0.0)
    assert metrics["teacher_divergence"] == pytest.approx((0.5 - 1.0 + 0.0) / 3)


def test_a_kl_in_the_loss_leaves_the_rewards_alone() -> None:
    settings = config(
        advantage={"name": "gae", "options": {"gae_lambda": 1.0}}, kl={"place": "loss"}
    )
    batch, scores = two_trajectories(settings)
    learnables = estimate_advantages(batch, scores, settings.config.algorithm, 0.1, {})
    returns = learnables[RETURNS]
    np.testing.assert_allclose(np.concatenate(returns), [0.0, 0.0, 2.0], atol=1e-6)


def test_whitened_advantages_have_mean_0_and_deviation_1_over_the_batch() -> None:
    settings = config(advantage={"name": "gae", "options": {"whiten": True}})
    batch, scores = scores_of(settings, PlainCluster(1), trajectories())
    estimated = estimate_advantages(batch, scores, settings.config.algorithm, 0.0, {})
    found_L = np.concatenate(estimated[ADVANTAGES])
    assert float(found_L.mean()) == pytest.approx(0.0, abs=1e-5)
    assert float(found_L.std()) == pytest.approx(1.0, rel=0.05)


def four(ids: Sequence[int], second: Sequence[float] = (0, 0, 0, 0)) -> list[Trajectory]:
    """Return the groups `ids` with the rewards 0, 1, 2 and 3 (twice), and another group."""
    found = trajectories([(2, 1), (2, 2), (2, 1), (2, 1)])
    return [
        replace(t, group=group, rewards=(*t.rewards, RewardPart("other", other, weight=0.5)))
        for t, group, other in zip(found, ids, second, strict=True)
    ]


@pytest.mark.parametrize("share_prompts", [False, True])
def test_groups_are_known_by_their_ids_wherever_their_members_lie(share_prompts: bool) -> None:
    """Rewards 0, 2, 4 + 1 and 6: in the group 7 the first and third, in 3 the others."""
    algorithm: dict[str, Any] = {
        "advantage": {"name": "dr_grpo"},
        "kl": "none",
        "mini_batches": 2,
    }
    settings = config(critic=False, share_prompts=share_prompts, **algorithm)
    batch, scores = scores_of(settings, PlainCluster(2), four([7, 3, 7, 3], (0, 0, 2, 0)))
    learnables = estimate_advantages(batch, scores, settings.config.algorithm, 0.0, {})
    found = [own.tolist() for own in learnables[ADVANTAGES]]
    assert found == [[-2.5], [-2.0, -2.0], [2.5], [2.0]]


@pytest.mark.parametrize("share_prompts", [False, True])
@pytest.mark.parametrize("cut_off", [{0}, {0, 2}, {0, 1, 2, 3}])
def test_of_what_is_cut_off_nothing_is_learned_and_its_reward_counts(
    share_prompts: bool, cut_off: set[int]
) -> None:
    """The first and the third are of one group, whose mean counts both."""
    algorithm: dict[str, Any] = {
        "advantage": {"name": "dr_grpo"},
        "kl": {"place": "loss"},
        "mask_truncated": True,
        "mini_batches": 2,
    }
    settings = config(critic=False, share_prompts=share_prompts, **algorithm)
    sampled = [
        replace(t, finish_reason="length" if i in cut_off else "stop")
        for i, t in enumerate(four([7, 3, 7, 3], (0, 0, 2, 0)))
    ]
    batch, scores = scores_of(settings, PlainCluster(2), sampled)
    learnables = estimate_advantages(batch, scores, settings.config.algorithm, 0.0, {})
    whole = [[-2.5], [-2.0, -2.0], [2.5], [2.0]]
    expected = [[] if i in cut_off else own for i, own in enumerate(whole)]
    found = [own.tolist() for own in learnables[ADVANTAGES]]
    assert found == expected
    counts = [mini.counts for mini in batch.minis]
    assert sum(c.tokens for c in counts) == sum(map(len, expected))
    assert sum(c.sequences for c in counts) == 4
    metrics = batch_metrics(batch, scores, 0.1)
    assert metrics["reward"] == 3.25 and metrics["truncated"] == len(cut_off) / 4
    assert np.isfinite([*metrics.values()]).all()
    for t, own in zip(with_columns(sampled, batch, learnables), expected, strict=True):
        row = t.columns[ADVANTAGES].tolist()
        assert t.loss_mask.all() and row == (own or [0.0] * len(t.response_tokens))


def test_greedy_rewards_are_those_of_the_group() -> None:
    algorithm: dict[str, Any] = {"advantage": {"name": "remax"}, "kl": "none"}
    settings = config(critic=False, **algorithm)
    batch, scores = scores_of(settings, PlainCluster(1), four([7, 3, 7, 3]))
    learnables = estimate_advantages(
        batch, scores, settings.config.algorithm, 0.0, {3: 1.0, 7: 10.0}
    )
    found = [own.tolist() for own in learnables[ADVANTAGES]]
    assert found == [[-10.0], [1.0, 1.0], [-6.0], [5.0]]


def test_groups_without_a_signal_are_counted() -> None:
    equal = [replace(t, rewards=t.rewards[1:]) for t in four([0, 0, 1, 1], (1, 1, 0, 1))]
    assert zero_signal(equal) == 0.5
    assert zero_signal([replace(t, group=i) for i, t in enumerate(equal)]) == 0


def test_metrics_of_a_batch_by_hand() -> None:
    settings = config(
        advantage={"name": "gae", "options": {"gae_lambda": 1.0}}, kl={"place": "loss"}
    )
    batch, scores = two_trajectories(settings)
    scores[REFERENCE_LOGPROBS] = [floats(-1.5, -1.0), floats(-1.25)]
    learnables = estimate_advantages(batch, scores, settings.config.algorithm, 0.1, {})
    metrics = batch_metrics(batch, scores, 0.1)
    assert metrics["reward"] == 1.0 and metrics["reward/length"] == 0.5
    assert (metrics["reward_min"], metrics["reward_max"], metrics["reward_std"]) == (0, 2, 1)
    assert metrics["response_tokens"] == 1.5 and metrics["finished"] == 0.5
    assert metrics["truncated"] == 0.5 and metrics["zero_signal"] == 0
    # KL per response: 0.5 - 1 = -0.5 and 0.75.
    assert metrics["kl"] == observed_kl(batch, scores) == pytest.approx(0.125)
    # Per token: (0.5 - 1) / 2 = -0.25 and 0.75, each response once.
    assert metrics["kl_per_token"] == pytest.approx(0.25)
    assert metrics["kl_coefficient"] == 0.1
    del scores[REFERENCE_LOGPROBS]
    alone = batch_metrics(batch, scores, 0.1)
    assert metrics.keys() - alone.keys() == {"kl", "kl_per_token", "kl_coefficient"}
    # Returns 0, 0, 2; less the values 1, 0.5, 4: -1, -0.5, -2.
    residual = np.var([-1.0, -0.5, -2.0])
    explained = pytest.approx(1 - residual / np.var([0.0, 0.0, 2.0]))
    found = explained_variance(np.concatenate(learnables[RETURNS]), np.concatenate(scores[VALUES]))
    assert found == {"explained_variance": explained}


def test_figures_of_a_step_round_alike_in_any_packs() -> None:
    """float32 sums depend on the order: here it is that of the trajectories."""
    rng = np.random.default_rng(0)
    sizes = [len(t.response_tokens) for t in trajectories()]
    gaps = [rng.normal(size=n).astype(np.float32) for n in sizes]
    figures = set()
    for ranks, mini_batches in [(1, 1), (1, 4), (2, 2), (4, 1)]:
        settings = config(mini_batches=mini_batches)
        batch, _ = scores_of(settings, PlainCluster(ranks), trajectories())
        scores = {SAMPLER_LOGPROBS: gaps, REFERENCE_LOGPROBS: [np.zeros_like(x) for x in gaps]}
        figures.add(observed_kl(batch, scores))
    assert figures == {np.mean([float(gap.sum()) for gap in gaps])}


def test_the_share_of_responses_that_repeat_themselves_is_a_figure() -> None:
    settings = config(advantage={"name": "reinforce"})
    found = trajectories([(3, 12), (3, 12), (3, 12), (3, 12)])
    found[2] = replace(found[2], response_tokens=np.full(12, 5))
    batch, scores = scores_of(settings, PlainCluster(1), found)
    assert batch_metrics(batch, scores, 0.0)["repetition"] == 0.25


def test_what_prefix_caches_had_is_a_share_of_all_episodes_prompts() -> None:
    """The cache had 20 + 260 of 100 + 300 tokens; a response without turns does not count."""
    figures = [(100.0, 20.0), (300.0, 260.0), (900.0, 0.0)]
    found = [
        replace(
            trajectory(i, 3, 4),
            turns=() if i == 2 else (Turn("assistant", 0, 4, ""),),
            figures={"prompt_tokens": asked, "cached_tokens": cached},
        )
        for i, (asked, cached) in enumerate(figures)
    ]
    assert episode_metrics(found) == {
        "episode/prompt_tokens": 200.0,
        "episode/cached_tokens": 140.0,
        "rollout/prefix_cache_hits": 0.7,
    }
    assert "rollout/prefix_cache_hits" not in episode_metrics([replace(found[0], figures={})])


@pytest.mark.parametrize(("step", "expected"), [(0, 0.5), (1, 0.48)])
def test_an_adaptive_coefficient_moves_once_the_actor_learns(step: int, expected: float) -> None:
    """No KL is far below the target: 0.2 less a horizon, of whose 10 responses this step has 2."""
    settings = config(kl={"adaptive": {"target": 1.0, "horizon": 10}}, critic_warmup_steps=1)
    batch, scores = two_trajectories(settings)
    state = RunState(
        step, data_position=0, data_rows=0, weight_version=0, kl_coefficient=0.5, seconds=0.0
    )
    assert next_kl_coefficient(settings, state, batch, scores) == pytest.approx(expected)


# The reference is 0.1 and 0.3 nats away at one response's tokens, 0.2 at the other's only one:
# 0.3 per response, which is the target and changes nothing; 0.2 per token, a third too little, of
# which the step takes -0.2 (the most) times 2 of 10 responses.
@pytest.mark.parametrize(("per", "expected"), [("response", 0.5), ("token", 0.48)])
def test_the_target_is_of_a_response_or_of_a_token(per: str, expected: float) -> None:
    settings = config(kl={"adaptive": {"target": 0.3, "per": per, "horizon": 10}})
    batch, scores = two_trajectories(settings)
    gaps = [floats(0.1, 0.3), floats(0.2)]
    own = policy_logprobs(scores)
    scores[REFERENCE_LOGPROBS] = [o - gap for o, gap in zip(own, gaps, strict=True)]
    state = RunState(
        0, data_position=0, data_rows=0, weight_version=0, kl_coefficient=0.5, seconds=0.0
    )
    assert next_kl_coefficient(settings, state, batch, scores) == pytest.approx(expected)


def test_returns_that_do_not_vary_leave_nothing_to_explain() -> None:
    assert explained_variance(floats(0.3, 0.3, 0.3), floats(1.0, 0.5, 4.0)) == {}


def branched(t: Trajectory, split: int) -> Trajectory:
    """The same episode, whose learned tokens from `split` on were sampled in another branch."""

    def part(own: slice, prompt: list[int]) -> Trajectory:
        return replace(
            t,
            prompt=replace(t.prompt, tokens=np.array(prompt)),
            response_tokens=t.response_tokens[own],
            loss_mask=t.loss_mask[own],
            columns={column: array[own] for column, array in t.columns.items()},
        )

    before = [*t.prompt.tokens.tolist(), *t.response_tokens[:split].tolist()]
    first = part(slice(0, split), t.prompt.tokens.tolist())
    return replace(part(slice(split, None), [*before, 5]), earlier=(replace(first, rewards=()),))


@pytest.mark.parametrize(
    "advantage",
    [
        {"name": "gae", "options": {"gae_lambda": 0.5, "gamma": 0.9}},
        {"name": "gae_turns", "options": {"gae_lambda": 0.5, "gamma": 0.9}},
        {"name": "grpo"},
        {"name": "reinforce_pp"},
    ],
    ids=lambda own: own["name"],
)
@pytest.mark.parametrize("share_prompts", [False, True])
def test_branches_have_the_advantages_of_the_whole_episode(
    advantage: dict[str, Any], share_prompts: bool
) -> None:
    """Episodes whose branches are cut where a turn ends have, token by token, what they have in
    one piece; in any packs, mini-batches and ranks."""
    critic = advantage["name"].startswith("gae")
    settings = config(
        critic=critic, share_prompts=share_prompts, advantage=advantage, mini_batches=2
    )
    whole = [
        replace(
            t.add_columns(
                {TOKEN_REWARDS: np.where(np.arange(len(t.response_tokens)) == 1, 0.5, 0.25)}
            ),
            group=i // 2,
            turns=(Turn("assistant", 0, 2, ""), Turn("assistant", 2, len(t.response_tokens), "")),
        )
        for i, t in enumerate(trajectories([(3, 4), (2, 5), (4, 3), (1, 6)]))
    ]
    pieces = [
        replace(
            branched(t, 2),
            turns=(Turn("assistant", 0, len(t.response_tokens) - 2, ""),),
            earlier=(replace(branched(t, 2).earlier[0], turns=(Turn("assistant", 0, 2, ""),)),),
        )
        if i % 3
        else t
        for i, t in enumerate(whole)
    ]
    found = []
    for own, ranks in ((whole, 1), (pieces, 2)):
        batch, scores = scores_of(settings, PlainCluster(ranks), own)
        learnables = estimate_advantages(batch, scores, settings.config.algorithm, 0.1, {})
        columns = [ADVANTAGES, *([RETURNS] if critic else [])]
        found.append([np.concatenate(learnables[column]) for column in columns])
        assert len(batch.trajectories) == sum(len(t.branches) for t in own)
        assert observed_kl(batch, scores) == pytest.approx(-0.25 * 18 / 4 + 0.5 * 18 / 4)
        assert observed_kl_per_token(batch, scores) == pytest.approx(0.25)
    for one, other in zip(*found, strict=True):
        np.testing.assert_allclose(other, one, atol=1e-6)


def test_branches_share_what_they_begin_with() -> None:
    """Branches of 3 + 2 tokens, and of these, one more and 2 or 4 to learn; the last token of what
    another begins with is in both."""
    settings = config(critic=False, share_prompts=True, advantage={"name": "grpo"})
    own = [replace(branched(t, 2), group=0) for t in trajectories([(3, 4), (3, 6)])]
    batch = pack_batch(own, settings, 1, 1, step=1)
    assert sum(p.tokens for p in packs_of(batch.minis)) == (5 + 1 + 1 + 2) + (5 + 1 + 1 + 4)
