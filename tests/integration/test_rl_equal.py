"""A step of reinforcement learning is the same on one rank and two, in any split into
micro-batches, with and without shared prompts, at every ZeRO stage: that of plain PyTorch.

Compared are the advantage of every token, the metrics and gradient norms, and the weights after the
step, of the actor and of a critic.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import astuple, dataclass, replace
from itertools import chain, combinations, product
from pathlib import Path

import pytest
from choice import pairwise, slow
from engine_reference import saved_weights
from ranks import RankProcesses
from rl_cases import GREEDY, KL, LARGE, SMALL, Case, ServingRanks, trajectories
from rl_reference import PlainRole, distance, plain_rl

from plimsoll import records
from plimsoll.config.choice import built_in_names
from plimsoll.jobs.rl_loop import train_actor, train_critic
from plimsoll.records import VALUES, Floats
from plimsoll.rl.batch import Batch, estimate_advantages, pack_batch, score_batch
from plimsoll.rl.layout import MiniBatch
from plimsoll.run.state import RunState
from plimsoll.train.loading import load_role
from plimsoll.trainer.worker import Worker

METRICS_BOUND = 2e-5
"""Relative to max(1, the value)."""
WEIGHTS_BOUND = 2e-4
"""Of the way that the weights went; see `distance`."""


POLICY_LOSSES = built_in_names("plimsoll.algorithm.policy_loss")
CORRECTIONS = (None, *built_in_names("plimsoll.algorithm.correction"))
ADVANTAGES = built_in_names("plimsoll.algorithm.advantage")
AGGREGATIONS, KLS = ("tokens", "sequences", "constant"), ("loss", "reward", "none")
DIVIDED = ((0, 1, 2, 3), (2, 1), (SMALL, LARGE), (True, False), (2, 1))
"""ZeRO stage, ranks, budget, shared prompts, mini-batches; first those that fill up the cases."""
AXES = (POLICY_LOSSES, CORRECTIONS, AGGREGATIONS, *DIVIDED)
APART = [(0, 1), (0, 3), (1, 3)]
"""Loss, correction and stage need not all meet in `make test`."""


def is_allowed(policy_loss: str, correction: str | None, mini_batches: int) -> bool:
    """DPPO corrects by itself, and REINFORCE knows no old policy."""
    return (correction is None or policy_loss != "dppo_tv") and (
        mini_batches == 1 or policy_loss != "reinforce"
    )


def of_losses(apart: list[tuple[int, int]]) -> list[Case]:
    """Losses, corrections and aggregations, divided in all ways; advantages and KLs in turns."""
    found = pairwise(*AXES, allowed=lambda c: is_allowed(c[0], c[1], c[-1]), apart=apart)
    return [
        Case(policy, aggregation, corrected, ADVANTAGES[i % len(ADVANTAGES)], KLS[i % 3], *divided)
        for i, (policy, corrected, aggregation, *divided) in enumerate(found)
    ]


def of_advantages() -> list[Case]:
    """Advantages with losses and KLs, divided in all ways; aggregations in turns."""
    axes = (ADVANTAGES, POLICY_LOSSES, KLS, *DIVIDED)
    found = pairwise(*axes, allowed=lambda c: is_allowed(c[1], None, c[-1]))
    return [
        Case(policy, AGGREGATIONS[i % 3], None, estimator, kl, *divided)
        for i, (estimator, policy, kl, *divided) in enumerate(found)
    ]


OFTEN = Case("clip", "tokens", "truncate", "gae", "none", 1, 2, SMALL, True, 1, 4)
"""The critic takes four steps for one of the actor's, as in Open-Reasoner-Zero."""
CASES = [*of_losses(APART), OFTEN]
MORE = dict.fromkeys([*of_losses([]), *of_advantages()])


def test_every_choice_is_in_a_case_that_is_not_slow() -> None:
    """Every two ways to divide a step are together in one case, too."""
    assert {case.policy_loss for case in CASES} == {*POLICY_LOSSES}
    assert {case.correction for case in CASES} == {*CORRECTIONS}
    assert {case.advantage for case in CASES} == {*ADVANTAGES}
    assert {case.kl for case in CASES} == {*KLS}
    divided = [astuple(case)[5:10] for case in CASES]
    for i, j in combinations(range(len(DIVIDED)), 2):
        assert {(case[i], case[j]) for case in divided} == {*product(DIVIDED[i], DIVIDED[j])}
    corrected = {(case.policy_loss, case.correction) for case in MORE}
    assert corrected >= {*product({*POLICY_LOSSES} - {"dppo_tv"}, CORRECTIONS)}
    estimated = {(case.policy_loss, case.advantage) for case in MORE}
    assert estimated == {*product(POLICY_LOSSES, ADVANTAGES)}


@dataclass(frozen=True)
class Trained:
    """advantages: of each trajectory, of its learned tokens. metrics: of each role."""

    batch: Batch
    advantages: list[Floats]
    metrics: Mapping[str, Mapping[str, float]]


def train(ranks: RankProcesses, case: Case, model: Path, other: Path, out: Path) -> Trained:
    """A step of the real loop, but for sampling; the models are written to out/ROLE."""
    spec, group = case.spec(model, other), ServingRanks(ranks, case.ranks)
    cluster = group.as_cluster
    for name in spec.roles:
        load_role(cluster, spec, name)
    batch = pack_batch(trajectories(), spec, case.ranks, case.ranks, step=1)
    scores = score_batch(batch, spec, cluster)
    columns = {
        **scores,
        **estimate_advantages(batch, scores, spec.config.algorithm, KL, GREEDY),
    }
    state = RunState(0, 0, 0, 0, KL, 0.0)
    metrics = {"actor": train_actor(batch, columns, spec, cluster, state)}
    if VALUES in columns:
        metrics["critic"] = train_critic(batch, columns, spec, cluster, state)
    for role in metrics:
        cluster.all(Worker.save_model, role, out / role)
    group.end()
    return Trained(batch, [*columns[records.ADVANTAGES]], metrics)


def updates_of(batch: Batch) -> dict[str, list[list[int]]]:
    """Return for each role which trajectories each update sees, in order."""
    minis = {"actor": batch.minis, "critic": batch.critic_minis}
    return {role: updates_in(batch, own) for role, own in minis.items()}


def updates_in(batch: Batch, minis: list[MiniBatch]) -> list[list[int]]:
    return [
        [int(s) for pack in chain(*mini.packs) for s in pack.samples_S if s >= 0]
        for _, mini in batch.schedule(minis, 1)
    ]


NAMES = {
    "actor": {"loss": "actor/loss", "grad_norm": "actor/grad_norm"},
    "critic": {"loss": "value_loss", "grad_norm": "critic/grad_norm"},
}
"""What the loop calls them."""


def worst_error(role: str, found: Mapping[str, float], want: PlainRole) -> float:
    named = {NAMES[role].get(name, name): value for name, value in want.metrics.items()}
    return max(abs(found[name] - x) / max(1.0, abs(x)) for name, x in named.items())


@pytest.mark.parametrize(
    "case",
    [*CASES, *(slow(case) for case in MORE if case not in CASES)],
    ids=lambda case: "-".join(map(str, astuple(case))),
)
def test_a_step_is_that_of_plain_pytorch(
    case: Case, untied: Path, tied: Path, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    ranks = request.getfixturevalue("one_rank" if case.ranks == 1 else "two_ranks")
    found = train(ranks, case, tied, untied, tmp_path)
    want = plain_rl(case, trajectories(), tied, untied, updates_of(found.batch))
    assert found.metrics.keys() == want.roles.keys()
    for own, expected in zip(found.advantages, want.advantages, strict=True):
        assert own.tolist() == pytest.approx(expected, abs=1e-5)
    for role, plain in want.roles.items():
        assert worst_error(role, found.metrics[role], plain) < METRICS_BOUND
        assert distance(saved_weights(tmp_path / role), plain) < WEIGHTS_BOUND


HARD = Case("clip", "tokens", None, "grpo", "none", 0, 2, SMALL, True, 2)


def test_the_bounds_see_what_they_should(tied: Path, untied: Path) -> None:
    """Whatever is optimised otherwise ends elsewhere, and so does one update in place of two."""
    sampled, halves = trajectories(), {"actor": [[*range(6)], [*range(6, 12)]]}
    want = plain_rl(HARD, sampled, tied, untied, halves).roles["actor"]
    assert want.metrics["clip_fraction"] > 0.05
    others = [
        *(replace(HARD, policy_loss=name) for name in POLICY_LOSSES if name != "clip"),
        *(replace(HARD, aggregation=name) for name in AGGREGATIONS[1:]),
        *(replace(HARD, correction=name) for name in CORRECTIONS[1:]),
        *(replace(HARD, kl=name) for name in ("loss", "reward")),
    ]
    for other in others:
        found = plain_rl(other, sampled, tied, untied, halves).roles["actor"]
        assert distance(found.after, want) > 20 * WEIGHTS_BOUND, other
    at_once = plain_rl(HARD, sampled, tied, untied, {"actor": [[*range(12)]]}).roles["actor"]
    assert distance(at_once.after, want) > 100 * WEIGHTS_BOUND


def packed(case: Case) -> Batch:
    spec = case.spec(Path("model"), Path("other"))
    return pack_batch(trajectories(), spec, case.ranks, case.ranks, step=1)


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_batches_are_divided_as_they_should_be(ranks: int) -> None:
    """With the small budget groups lie in several packs, with the large one each rank has one."""
    [mini] = packed(replace(HARD, ranks=ranks, mini_batches=1)).minis
    packs = [pack for own in mini.packs for pack in own]
    groups = [{trajectories()[s].group for s in p.samples_S if s >= 0} for p in packs]
    assert sum(0 in own for own in groups) > 1 and sum(2 in own for own in groups) > 1
    assert any(pack.shared_S.any() for pack in packs)
    assert not any(
        p.shared_S.any()
        for own in packed(replace(HARD, ranks=ranks, share_prompts=False)).minis[0].packs
        for p in own
    )
    [mini] = packed(replace(HARD, ranks=ranks, mini_batches=1, budget=LARGE)).minis
    assert [len(own) for own in mini.packs] == [1] * ranks
    assert sum(not t.loss_mask.any() for t in trajectories()) == 1
