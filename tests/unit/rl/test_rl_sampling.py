"""Prompts to requests and back, over a cluster that answers in any order."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import cast

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from plimsoll.cluster.protocol import Cluster
from plimsoll.config.rl import RlConfig
from plimsoll.jobs.which import spec_of
from plimsoll.records import Prompt, RewardPart, Trajectory, single_turn
from plimsoll.rl.sampling import evaluate, probe_sequences, sample
from plimsoll.rollout.protocol import Request
from plimsoll.spec.run_spec import RunSpec


@dataclass
class PlainCluster:
    """Answers each prompt with the seed that it was given, the last request first."""

    at_once: int
    requests: list[Request] = field(default_factory=list)

    def responses_per_request(self) -> int:
        return self.at_once

    def generate(self, requests: Sequence[Request]) -> Iterator[tuple[int, list[Trajectory]]]:
        self.requests += requests
        for place in reversed(range(len(requests))):
            request = requests[place]
            yield (
                place,
                [
                    answer(prompt, number, seed)
                    for prompt, seed in zip(request.prompts, request.seeds(), strict=True)
                    for number in range(request.responses)
                ],
            )


def answer(prompt: Prompt, number: int, seed: int) -> Trajectory:
    logprobs = np.zeros(1, dtype=np.float32)
    return single_turn(prompt, number, np.array([seed]), logprobs, "", "stop", 0)


def prompts(*indices: int) -> list[Prompt]:
    return [Prompt(i, np.array([1, 2]), str(i)) for i in indices]


def config(responses: int) -> RunSpec[RlConfig]:
    found = RlConfig.model_validate(
        {
            "run": {"directory": "runs/x", "steps": 2, "seed": 5},
            "data": {"train": {"path": "x.jsonl", "prompt": "p"}},
            "batch": {"prompts": 4, "responses": responses},
            "actor": {"model": {"path": "m"}},
            "critic": {"model": {"path": "m"}},
            "rewards": {"r": {"name": "length"}},
        }
    )
    return spec_of(found)


def scored(trajectories: Sequence[Trajectory]) -> list[Trajectory]:
    return [
        replace(t, rewards=(RewardPart("r", float(t.prompt.index + t.sample_index), weight=2.0),))
        for t in trajectories
    ]


def ask(cluster: PlainCluster, responses: int, asked: list[Prompt], step: int) -> list[Trajectory]:
    return sample(cast(Cluster, cluster), config(responses), asked, step, scored)


@given(st.lists(st.integers(0, 5), min_size=1, max_size=9), st.integers(1, 4), st.integers(1, 9))
def test_trajectories_come_in_the_order_of_the_prompts(
    indices: list[int], responses: int, at_once: int
) -> None:
    cluster = PlainCluster(at_once)
    found = ask(cluster, responses, prompts(*indices), step=1)
    expected = [(index, number) for index in indices for number in range(responses)]
    assert [(t.prompt.index, t.sample_index) for t in found] == expected
    assert all(t.reward == 2 * (t.prompt.index + t.sample_index) for t in found)
    sizes = [len(r.prompts) * r.responses for r in cluster.requests]
    assert all(size <= max(at_once, responses) for size in sizes)
    # A prompt that an epoch's end brings twice into a step is sampled twice, in two groups.
    assert len({int(t.response_tokens[0]) for t in found}) == len(indices)
    groups = [found[i : i + responses] for i in range(0, len(found), responses)]
    assert all(len({t.group for t in own}) == 1 for own in groups)
    assert len({t.group for t in found}) == len(indices)


def test_a_step_can_be_sampled_again_and_others_have_other_seeds() -> None:
    def seeds(step: int) -> list[int]:
        found = ask(PlainCluster(1), 1, prompts(3, 4), step)
        return [int(t.response_tokens[0]) for t in found]

    assert seeds(1) == seeds(1)
    assert not set(seeds(1)) & set(seeds(2))


def test_evaluation_takes_one_response_a_prompt_and_the_mean_of_each_part() -> None:
    cluster = PlainCluster(8)
    asked = [replace(prompt, tokens=np.array([1, prompt.index])) for prompt in prompts(1, 2, 6)]
    found = evaluate(cast(Cluster, cluster), config(3), asked, scored)
    assert found["eval/reward"] == 6.0 and found["eval/r"] == 3.0
    assert found["eval/r_low"] < 3.0 < found["eval/r_high"]
    assert set(found) <= set(config(3).evaluation.written)
    assert [r.responses for r in cluster.requests] == [1]


def test_weight_syncs_are_proved_with_prompts_of_two_tokens_or_more() -> None:
    short = [Prompt(i, np.array([i]), str(i)) for i in (3, 4, 5)]
    long = prompts(*range(20))
    probe = probe_sequences([*short, *long], config(1))
    assert [p.tolist() for p in probe] == [[1, 2]] * 16
    assert [p.tolist() for p in probe_sequences(short, config(1))] == [[3, 5]]
    assert [p.tolist() for p in probe_sequences(short[:1], config(1))] == [[3, 3]]
