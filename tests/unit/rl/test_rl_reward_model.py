"""Which ranks score, where scores land, and what is made of the scores of steps."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from plimsoll.cluster.protocol import Cluster, Pending
from plimsoll.config.reward import RewardModelConfig
from plimsoll.config.rl import RlConfig
from plimsoll.jobs.rl_loop import _with_fewest_ranks
from plimsoll.jobs.which import spec_of
from plimsoll.records import Floats, Pack, Prompt, single_turn
from plimsoll.resolve.run_spec import RunSpec
from plimsoll.rl.reward_model import of_response, score_by_models


def model(steps: dict[str, str] | None) -> RewardModelConfig:
    values: dict[str, Any] = {"role": {"model": {"path": "m"}}, "steps": steps}
    return RewardModelConfig.model_validate(values)


# Scores are logits: ln 3 is a probability of 3/4, 0 of 1/2.
@pytest.mark.parametrize(
    ("take", "value"), [("min", 0.5), ("mean", 0.625), ("product", 0.375), ("last", 0.5)]
)
def test_steps_by_hand(take: str, value: float) -> None:
    scores = np.array([math.log(3), 0.0], dtype=np.float32)
    assert of_response(scores, model({"take": take})) == pytest.approx(value)


def test_a_step_that_is_surely_wrong_has_the_probability_0() -> None:
    """exp(1000) is over the range of a float."""
    scores = np.array([-1000.0, 1000.0], dtype=np.float32)
    assert of_response(scores, model({"take": "min"})) == 0
    assert of_response(scores, model({"take": "last"})) == 1


def test_without_steps_it_is_the_score_itself() -> None:
    assert of_response(np.array([-2.5], dtype=np.float32), model(None)) == -2.5


@dataclass
class Scorers:
    """Ranks that score a sequence by the sum of its tokens."""

    streams: int
    roles: list[str] = field(default_factory=list)

    def call(
        self, task: Callable[..., Any], per_stream: Sequence[tuple[str, list[Pack], Any]]
    ) -> Pending[list[Floats]]:
        assert len(per_stream) == self.streams
        self.roles += [role for role, _, _ in per_stream]
        sums = [[_sums(pack) for pack in packs] for _, packs, _ in per_stream]
        return Pending(lambda: sums)


def _sums(pack: Pack) -> Floats:
    sums = [part.sum() for part in np.split(pack.tokens_T, pack.cu_seqlens[1:-1])]
    return np.array(sums, dtype=np.float32)


def judged(cluster: dict[str, Any], **changes: Any) -> RunSpec[RlConfig]:
    models = {name: {"role": {"model": {"path": name}}} for name in ("a", "b")}
    values = {
        "run": {"directory": "runs/x", "steps": 2},
        "data": {"train": {"path": "x.jsonl", "prompt": "p"}},
        "actor": {"model": {"path": "m"}},
        "reward_models": models,
        "algorithm": {"advantage": {"name": "grpo"}},
        "cluster": cluster,
    }
    return spec_of(RlConfig.model_validate(values | changes))


@pytest.mark.parametrize("own", [None, 1, 3])
def test_each_response_gets_the_score_of_its_own_tokens_from_the_group_of_the_models(
    own: int | None,
) -> None:
    spec = judged({"ranks": 2, "reward_ranks": own})
    actors, scorers = Scorers(2), Scorers(own or 2)
    groups = {} if own is None else {"reward": scorers}
    cluster = SimpleNamespace(streams=2, call=actors.call, own_groups=groups)
    trajectories = [
        single_turn(
            prompt=Prompt(i, np.full(3, i), f"prompt {i}"),
            sample_index=0,
            response_tokens=np.arange(1 + i % 4),
            sampler_logprobs=np.zeros(1 + i % 4, np.float32),
            response_text="",
            finish_reason="stop",
            weight_version=0,
            rewards=(),
            group=i,
        )
        for i in range(7)
    ]
    scored = score_by_models(trajectories, spec, cast(Cluster, cluster))
    for i, trajectory in enumerate(scored):
        total = 3.0 * i + sum(range(1 + i % 4))
        assert [(part.name, part.value) for part in trajectory.rewards] == [
            ("a", total),
            ("b", total),
        ]
    asked, idle = (actors, scorers) if own is None else (scorers, actors)
    assert set(asked.roles) == {"reward.a", "reward.b"} and not idle.roles


def test_an_evaluation_keeps_the_ranks_of_the_reward_models_alone() -> None:
    own_nodes = {"actor": 1, "reward": 2, "engines": 3}
    apart = {"ranks": 4, "reward_ranks": 6, "nodes": 6, "own_nodes": own_nodes}
    cluster = _with_fewest_ranks(judged(apart)).cluster
    assert cluster.rank_counts == {"actor": 6} and not cluster.own_nodes.counts
    assert _with_fewest_ranks(judged({"ranks": 4})).cluster.rank_counts == {"actor": 4}
    rules = {"reward_models": {}, "rewards": {"length": {"name": "length"}}}
    assert _with_fewest_ranks(judged({"ranks": 4}, **rules)).cluster.rank_counts == {"actor": 1}


def test_an_evaluation_shares_packs_as_the_reward_models_did() -> None:
    rules = {"reward_models": {}, "rewards": {"length": {"name": "length"}}}
    sharing = {"ranks": 4, "sequence_parallel": 4}
    alone = _with_fewest_ranks(judged(sharing, **rules)).cluster
    assert (alone.ranks, alone.sequence_parallel) == (1, 1)
    apart = {**sharing, "reward_ranks": 3, "reward_sequence_parallel": 3}
    cluster = _with_fewest_ranks(judged(apart)).cluster
    assert (cluster.ranks, cluster.sequence_parallel) == (3, 3)
    assert cluster.reward_sequence_parallel is None


@pytest.mark.parametrize(("reward_ranks", "ranks"), [(None, 8), (2, 8), (12, 12)])
def test_an_evaluation_has_a_rank_on_each_card_that_engines_share(
    reward_ranks: int | None, ranks: int
) -> None:
    cluster = {"ranks": 8, "reward_ranks": reward_ranks, "device": "cuda", "hardware": "20xH100"}
    rollout = {"placement": "shared", "engines": 4, "vllm": {"tensor_parallel": 2}}
    models = {"reward_models": {}, "rewards": {"length": {"name": "length"}}}
    spec = judged(cluster, rollout=rollout, **(models if reward_ranks is None else {}))
    assert _with_fewest_ranks(spec).cluster.rank_counts == {"actor": ranks}
