"""A step's trajectories through packs and back: every number lands at its own trajectory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from plimsoll.cluster.protocol import Cluster
from plimsoll.config.rl import RlConfig
from plimsoll.jobs.rl_loop import next_kl_coefficient
from plimsoll.jobs.which import spec_of
from plimsoll.records import Floats, Pack, Prompt, RewardPart, Trajectory, single_turn
from plimsoll.rl.batch import (
    Batch,
    Scores,
    batch_metrics,
    estimate_advantages,
    mean_advantages,
    observed_kl,
    pack_batch,
    policy_stream,
    score,
)
from plimsoll.rl.critic import explained_variance, score_values, value_stream
from plimsoll.run.state import RunState
from plimsoll.spec.run_spec import RunSpec

LENGTHS = [(3, 4), (1, 7), (5, 1), (2, 2), (9, 9), (4, 3), (1, 1), (6, 5)]
"""Prompt and response tokens of each trajectory."""


def config(seed: int = 5, **algorithm: Any) -> RunSpec[RlConfig]:
    found = RlConfig.model_validate(
        {
            "run": {"directory": "runs/x", "steps": 2, "seed": seed},
            "data": {"train": {"path": "x.jsonl", "prompt": "p"}},
            "batch": {"prompts": 8, "micro_batch_tokens": 20},
            "actor": {"model": {"path": "m"}},
            "critic": {"model": {"path": "m"}},
            "rewards": {"length": {"name": "length"}},
            "algorithm": {"whiten_advantages": False, **algorithm},
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
    )


def trajectories(lengths: Sequence[tuple[int, int]] = LENGTHS) -> list[Trajectory]:
    return [trajectory(i, *length) for i, length in enumerate(lengths)]


SHIFT = {"actor": 0.0, "reference": 0.25, "critic": 0.5}


@dataclass
class PlainCluster:
    """Scores a learned token with a thousandth of its number, less what the role is shifted by."""

    ranks: int
    critic_ranks: int | None = None
    asked: list[tuple[str, str]] = field(default_factory=list)

    @property
    def critics(self) -> PlainCluster:
        if self.critic_ranks is None:
            return self
        return PlainCluster(self.critic_ranks, asked=self.asked)

    def each(self, task: Callable[..., Any], arguments: Sequence[tuple[object, ...]]) -> list[Any]:
        answers = []
        for role, packs in cast("Sequence[tuple[str, list[Pack]]]", arguments):
            answers.append([-p.targets_L.astype(np.float32) / 1000 - SHIFT[role] for p in packs])
            self.asked.append((task.__name__, role))
        return answers


def scores_of(
    settings: RunSpec[RlConfig], cluster: PlainCluster, found: Sequence[Trajectory]
) -> tuple[Batch, Scores]:
    batch = pack_batch(list(found), settings, cluster.ranks, cluster.critics.ranks, step=1)
    return batch, score(batch, settings, cast(Cluster, cluster))


def values_of(batch: Batch, cluster: PlainCluster) -> list[Floats]:
    return score_values(batch, cast(Cluster, cluster))


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
    batch, scores = scores_of(settings, cluster, found)
    values = values_of(batch, cluster)
    assert sorted(i for mini in batch.minis for i in mini.members) == list(range(6))
    assert scores.reference is not None
    for i, t in enumerate(found):
        expected = -t.response_tokens / np.float32(1000)
        np.testing.assert_allclose(scores.policy[i], expected, rtol=1e-6)
        np.testing.assert_allclose(scores.reference[i], expected - 0.25, rtol=1e-6)
        np.testing.assert_allclose(values[i], expected - 0.5, rtol=1e-6)


@pytest.mark.parametrize(("ranks", "critic_ranks"), [(1, None), (3, None), (2, 3)])
def test_streams_lie_beside_the_tokens_that_they_belong_to(
    ranks: int, critic_ranks: int | None
) -> None:
    settings = config(mini_batches=2)
    found = trajectories()
    cluster = PlainCluster(ranks, critic_ranks)
    batch, scores = scores_of(settings, cluster, found)
    own = [t.response_tokens.astype(np.float32) for t in found]
    for mini in batch.minis:
        policy_of = policy_stream(mini, scores, own, kl_loss=True)
        value_of = value_stream(mini, values_of(batch, cluster), own)
        for p in chain.from_iterable(mini.packs):
            policy = policy_of(p)
            old, reference = policy.old_logprobs_L, policy.reference_logprobs_L
            assert old is not None and reference is not None
            np.testing.assert_array_equal(policy.advantages_L, p.targets_L)
            np.testing.assert_allclose(old, -p.targets_L / 1000, rtol=1e-6)
            np.testing.assert_allclose(reference, old - 0.25, rtol=1e-6)
        for p in chain.from_iterable(mini.critic_packs):
            value = value_of(p)
            np.testing.assert_array_equal(value.returns_L, p.targets_L)
            np.testing.assert_allclose(value.old_values_L, -p.targets_L / 1000 - 0.5, rtol=1e-6)


def test_a_step_with_one_update_does_not_score_the_policy_again() -> None:
    cluster = PlainCluster(ranks=2)
    found = trajectories()
    batch, scores = scores_of(config(), cluster, found)
    assert set(cluster.asked) == {("log_probs", "reference")}
    assert not scores.recomputed
    assert all(
        np.array_equal(s, t.sampler_logprobs) for s, t in zip(scores.policy, found, strict=True)
    )
    [mini] = batch.minis
    own = [floats(*[0.0] * len(t.response_tokens)) for t in found]
    stream = policy_stream(mini, scores, own, kl_loss=False)
    streams = [stream(p) for p in chain.from_iterable(mini.packs)]
    assert all(s.old_logprobs_L is None and s.reference_logprobs_L is None for s in streams)


@pytest.mark.parametrize("settings", [config(epochs=2), config(mini_batches=2)])
def test_a_step_with_several_updates_does(settings: RunSpec[RlConfig]) -> None:
    cluster = PlainCluster(ranks=1)
    _, scores = scores_of(settings, cluster, trajectories())
    assert ("log_probs", "actor") in cluster.asked and scores.recomputed


def test_without_a_kl_no_reference_is_asked() -> None:
    cluster = PlainCluster(ranks=1)
    settings = config(kl={"place": "none"})
    batch, scores = scores_of(settings, cluster, trajectories())
    assert cluster.asked == [] and scores.reference is None
    values = values_of(batch, cluster)
    learnables = estimate_advantages(batch, scores, values, settings, kl_coefficient=0.1)
    assert learnables.kl is None and "kl" not in batch_metrics(batch, scores, learnables)


def test_every_epoch_goes_over_all_mini_batches_in_an_order_of_its_own() -> None:
    settings = config(mini_batches=8, epochs=3)

    def order(step: int) -> list[int]:
        schedule = list(pack_batch(trajectories(), settings, 1, 1, step).schedule(3))
        assert [update for update, _ in schedule] == list(range(24))
        return [int(mini.members[0]) for _, mini in schedule]

    epochs = [order(1)[i : i + 8] for i in (0, 8, 16)]
    assert all(sorted(epoch) == list(range(8)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]
    assert order(1) == order(1) != order(2)


def test_counts_are_of_the_whole_mini_batch() -> None:
    found = trajectories()
    batch = pack_batch(found, config(mini_batches=2), ranks=2, critic_ranks=3, step=1)
    for mini in batch.minis:
        loss_mask = sum(len(found[i].response_tokens) for i in mini.members)
        assert (mini.counts.tokens, mini.counts.sequences) == (loss_mask, 4)
        assert (len(mini.packs), len(mini.critic_packs)) == (2, 3)
        for packs in (mini.packs, mini.critic_packs):
            assert sum(p.loss_tokens for own in packs for p in own) == loss_mask
    assert batch.tokens == sum(map(sum, LENGTHS))


def two_trajectories() -> tuple[list[Trajectory], Scores]:
    """Responses of 2 and 1 tokens with the rewards 0 and 2 (1 times its weight)."""
    found = trajectories([(1, 2), (1, 1)])
    scores = Scores(
        policy=[floats(-1.0, -2.0), floats(-0.5)],
        recomputed=True,
        reference=[floats(-1.5, -1.0), floats(-1.0)],
    )
    return found, scores


VALUES = [floats(1.0, 0.5), floats(4.0)]
"""Of the critic, for the two."""


def test_advantages_by_hand() -> None:
    found, scores = two_trajectories()
    options = {"name": "gae", "options": {"gamma": 1.0, "gae_lambda": 0.5}}
    settings = config(advantage=options, kl={"coefficient": 0.1})
    batch = pack_batch(found, settings, 1, 1, step=1)
    learnables = estimate_advantages(batch, scores, VALUES, settings, kl_coefficient=0.1)
    # k1 is policy - reference: 0.5, -1, 0.5; rewards -0.05, 0.1 + 0 and 2 - 0.05.
    # First: delta 0.1 - 0.5 = -0.4 at the end, before it -0.05 + 0.5 - 1 + 0.5 * -0.4 = -0.75.
    # Second: 1.95 - 4 = -2.05.
    assert learnables.kl is not None
    np.testing.assert_allclose(np.concatenate(learnables.kl), [0.5, -1.0, 0.5])
    np.testing.assert_allclose(learnables.advantages[0], [-0.75, -0.4], atol=1e-6)
    np.testing.assert_allclose(learnables.advantages[1], [-2.05], atol=1e-6)
    np.testing.assert_allclose(learnables.returns[0], [0.25, 0.1], atol=1e-6)
    np.testing.assert_allclose(learnables.returns[1], [1.95], atol=1e-6)
    assert mean_advantages(learnables) == pytest.approx([-0.575, -2.05])


def test_a_kl_in_the_loss_leaves_the_rewards_alone() -> None:
    found, scores = two_trajectories()
    settings = config(
        advantage={"name": "gae", "options": {"gae_lambda": 1.0}}, kl={"place": "loss"}
    )
    batch = pack_batch(found, settings, 1, 1, step=1)
    learnables = estimate_advantages(batch, scores, VALUES, settings, kl_coefficient=0.1)
    np.testing.assert_allclose(np.concatenate(learnables.returns), [0.0, 0.0, 2.0], atol=1e-6)


def test_whitened_advantages_have_mean_0_and_deviation_1_over_the_batch() -> None:
    found = trajectories()
    settings = config(whiten_advantages=True)
    cluster = PlainCluster(1)
    batch, scores = scores_of(settings, cluster, found)
    values = values_of(batch, cluster)
    learnables = estimate_advantages(batch, scores, values, settings, 0.0)
    flat = np.concatenate(learnables.advantages)
    assert float(flat.mean()) == pytest.approx(0.0, abs=1e-5)
    assert float(flat.std()) == pytest.approx(1.0, rel=0.05)


def test_metrics_of_a_batch_by_hand() -> None:
    found, scores = two_trajectories()
    scores = replace(scores, reference=[floats(-1.5, -1.0), floats(-1.25)])
    settings = config(
        advantage={"name": "gae", "options": {"gae_lambda": 1.0}}, kl={"place": "loss"}
    )
    batch = pack_batch(found, settings, 1, 1, step=1)
    learnables = estimate_advantages(batch, scores, VALUES, settings, 0.1)
    metrics = batch_metrics(batch, scores, learnables)
    assert metrics["reward"] == 1.0 and metrics["reward/length"] == 0.5
    assert metrics["response_tokens"] == 1.5 and metrics["finished"] == 0.5
    # KL per response: 0.5 - 1 = -0.5 and 0.75.
    assert metrics["kl"] == observed_kl(scores) == pytest.approx(0.125)
    # Sampled 0, -0.001 and -1; the trainer says -1, -2 and -0.5.
    assert metrics["logprob_gap"] == pytest.approx((1.0 + 1.999 + 0.5) / 3)
    # Returns 0, 0, 2; less the values 1, 0.5, 4: -1, -0.5, -2.
    residual = np.var([-1.0, -0.5, -2.0])
    explained = pytest.approx(1 - residual / np.var([0.0, 0.0, 2.0]))
    assert explained_variance(learnables.returns, VALUES) == {"explained_variance": explained}


@pytest.mark.parametrize(("step", "expected"), [(0, 0.5), (1, 0.48)])
def test_an_adaptive_coefficient_moves_once_the_actor_learns(step: int, expected: float) -> None:
    """No KL is far below the target: 0.2 less a horizon, of whose 10 responses this step has 2."""
    found, scores = two_trajectories()
    settings = config(kl={"target": 1.0, "horizon": 10}, critic_warmup_steps=1)
    batch = pack_batch(found, settings, 1, 1, step=1)
    state = RunState(
        step, data_position=0, data_rows=0, weight_version=0, kl_coefficient=0.5, seconds=0.0
    )
    assert next_kl_coefficient(settings, state, batch, scores) == pytest.approx(expected)


def test_returns_that_do_not_vary_leave_nothing_to_explain() -> None:
    found, scores = two_trajectories()
    same = [replace(t, rewards=(RewardPart("length", 0.3, 1.0),)) for t in found]
    settings = config(
        advantage={"name": "gae", "options": {"gae_lambda": 1.0}}, kl={"place": "loss"}
    )
    batch = pack_batch(same, settings, 1, 1, step=1)
    learnables = estimate_advantages(batch, scores, VALUES, settings, 0.1)
    np.testing.assert_allclose(np.concatenate(learnables.returns), 0.3, rtol=1e-6)
    assert explained_variance(learnables.returns, VALUES) == {}
