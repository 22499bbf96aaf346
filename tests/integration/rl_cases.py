"""What the tests of reinforcement learning train on, and ranks that serve its loop."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, cast

import numpy as np
from engine_cases import SEED, VOCAB
from ranks import RankProcesses

from plimsoll.cluster.protocol import Cluster, Pending, Shortages
from plimsoll.config.rl import RlConfig
from plimsoll.jobs.which import spec_of
from plimsoll.records import SAMPLER_LOGPROBS, WEIGHT_VERSIONS, Prompt, RewardPart, Trajectory
from plimsoll.resolve.run_spec import RunSpec
from plimsoll.trainer.process_group import Place
from plimsoll.trainer.worker import Worker

R = TypeVar("R")

GROUPS = (5, 1, 4, 2)
"""Responses to each prompt: ragged, as where some were dropped."""
LONGEST = 14
"""Tokens of a response at most."""
SMALL, LARGE = 31, 10_000
"""Budgets of a micro-batch: about one response alone, so that every group is split; all of a
rank's."""
KL, BONUS, CONSTANT, RATE = 0.1, 0.05, 9, 4e-3
PARTS = (1.0, 0.5)
"""Weights of the two rewards."""


@dataclass(frozen=True)
class Case:
    """What is optimised, and how it is divided. kl: its place."""

    policy_loss: str
    aggregation: str
    correction: str | None
    advantage: str
    kl: str
    stage: int
    ranks: int
    budget: int
    share_prompts: bool
    mini_batches: int
    critic_mini_batches: int | None = None

    def spec(self, model: Path, other: Path) -> RunSpec[RlConfig]:
        """Its run. other: the model of the reference and the critic. Adam's epsilon is large:
        where a gradient is nothing but rounding, the sign of its update would be as well."""
        exact = {"dtype": "float32", "head_chunk": 16}
        learning = {
            "model": {"path": str(model), **exact},
            "zero": {"stage": self.stage},
            "optimizer": {"learning_rate": RATE, "eps": 1e-4, "max_grad_norm": 0.0},
        }
        from_other = {"model": {"path": str(other), **exact}}
        values: dict[str, Any] = {
            "run": {"directory": "runs/equal", "steps": 4, "seed": SEED},
            "cluster": {"ranks": self.ranks},
            "data": {"train": {"path": "x.jsonl", "prompt": "p"}},
            "batch": {
                "prompts": 6,
                "responses": 2,
                "micro_batch_tokens": self.budget,
                "share_prompts": self.share_prompts,
            },
            "actor": learning,
            "rewards": {"length": {"name": "length"}},
            "rollout": {"sampling": {"max_new_tokens": LONGEST}},
            "algorithm": {
                "advantage": {"name": self.advantage},
                "policy_loss": {"name": self.policy_loss},
                "aggregation": self.aggregation,
                "aggregation_tokens": CONSTANT if self.aggregation == "constant" else None,
                "correction": None if self.correction is None else {"name": self.correction},
                "mini_batches": self.mini_batches,
                "critic_mini_batches": self.critic_mini_batches,
                "kl": "none"
                if self.kl == "none"
                else {
                    "place": self.kl,
                    "estimator": "k3" if self.kl == "loss" else "k1",
                    "coefficient": KL,
                    "ratio_corrected": self.kl == "loss",
                },
                "entropy_bonus": BONUS,
            },
        }
        if self.kl != "none":
            values["reference"] = {**from_other, "zero": {"stage": 3 if self.stage == 3 else 0}}
        if self.advantage.startswith("gae"):
            values["critic"] = learning | from_other
        return spec_of(RlConfig.model_validate(values))


def trajectories() -> list[Trajectory]:
    """A step's: groups that are ragged, responses of 1 to 14 tokens of which some were not sampled,
    and one of which none was."""
    rng = np.random.default_rng(7)
    found = []
    for group, size in enumerate(GROUPS):
        prompt = Prompt(group, rng.integers(0, VOCAB, int(rng.integers(3, 12))), f"prompt {group}")
        found += [_trajectory(rng, prompt, group, i) for i in range(size)]
    return found


def _trajectory(rng: np.random.Generator, prompt: Prompt, group: int, index: int) -> Trajectory:
    """Log-probs of a model that knows nothing are about -log(VOCAB), so the sampler's are drawn
    around that: its ratios fall on both sides of every bound."""
    length = int(rng.integers(1, LONGEST + 1))
    loss_mask = rng.random(length) < (0.0 if (group, index) == (0, 2) else 0.8)
    drawn = rng.normal(-np.log(VOCAB), 0.7, length)
    return Trajectory(
        prompt=prompt,
        group=group,
        sample_index=index,
        response_tokens=rng.integers(0, VOCAB, length),
        loss_mask=loss_mask,
        columns={
            SAMPLER_LOGPROBS: np.where(loss_mask, drawn, 0).astype(np.float32),
            WEIGHT_VERSIONS: np.zeros(length, np.int64),
        },
        response_text="",
        finish_reason="stop",
        rewards=tuple(
            RewardPart(f"part {i}", float(rng.normal()), weight) for i, weight in enumerate(PARTS)
        ),
    )


GREEDY = {0: 0.5, 1: -0.2, 2: 0.1, 3: 0.9}
"""The reward of the greedy response to each group's prompt."""


class ServingRanks:
    """`RankProcesses` as the ranks of a loop: each has a worker that stays between calls."""

    def __init__(self, processes: RankProcesses, ranks: int) -> None:
        self.shortages = Shortages()  # none is survived: each step is one call
        self._processes = processes
        self.streams = ranks
        processes.run(_begin)

    @property
    def own_groups(self) -> dict[str, ServingRanks]:
        return {}

    def call(self, task: Callable[..., R], per_stream: Iterable[tuple[object, ...]]) -> Pending[R]:
        results = self._processes.run(_call, task.__name__, list(per_stream))
        return Pending(lambda: results)

    def all(self, task: Callable[..., R], *arguments: object) -> list[R]:
        return self.call(task, [arguments] * self.streams).result()

    def end(self) -> None:
        """Forget the workers."""
        self._processes.run(_end)

    @property
    def as_cluster(self) -> Cluster:
        """What scoring and training ask for is there; nothing samples."""
        return cast(Cluster, self)


_WORKERS: list[Worker] = []
"""Of a rank's process, its worker."""


def _begin(place: Place) -> None:
    _WORKERS[:] = [Worker(place)]


def _call(place: Place, method: str, arguments: list[tuple[object, ...]]) -> Any:
    return _WORKERS[0].do(method, *arguments[place.rank])


def _end(place: Place) -> None:
    _WORKERS.clear()
