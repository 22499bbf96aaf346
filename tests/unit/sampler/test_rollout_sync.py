"""The bookkeeping of a weight sync, over a route made of plain dictionaries."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
import torch
from buckets import bucket_of, bytes_of, tensors_in
from torch import Tensor

from plimsoll.config.rollout import SyncConfig
from plimsoll.errors import WeightSyncError
from plimsoll.model.disturbance import UNSCALED, Disturbance, Scaled
from plimsoll.records import Floats, Ints, Prompt, Trajectory, single_turn
from plimsoll.sync.buckets import Arrivals, WeightBucket, sum_pieces
from plimsoll.sync.proof import Rehearsal, SyncReport, WeightSync, prepare_sync, prove, sync_weights

PLAN = (("bias",), ("steps", "first"))
PROBE: list[Ints] = [np.array([1, 0, 1]), np.array([2, 2])]


@dataclass
class PlainEngine:
    """A model whose log-prob of a token is `steps[token] + bias`, off by `noise`.

    It samples with its weights, unless it has those of a cache.
    """

    weights: dict[str, Tensor]
    noise: float = 0.0
    version: int = 0
    arrivals: Arrivals = field(default_factory=lambda: Arrivals(()))
    cached: dict[str, Tensor] | None = None

    def receive(self, bucket: WeightBucket) -> None:
        self.arrivals.take(bucket.tensors, sum_pieces(bucket.tensors, bytes_of(bucket)))
        self.weights |= tensors_in(bucket)

    def log_probs(self, sequences: Sequence[Ints]) -> list[Floats]:
        steps, bias = self.weights["steps"].numpy(), self.weights["bias"].numpy()
        return [(steps[tokens[1:]] + bias + self.noise).astype(np.float32) for tokens in sequences]

    def answer(self, number: int, prompt: Ints) -> Trajectory:
        """Token 1, with the log-prob of the weights that the engine samples with."""
        weights = self.cached or self.weights
        logprob = float(weights["steps"][1] + weights["bias"]) + self.noise
        return single_turn(
            Prompt(number, prompt, ""),
            0,
            np.array([1]),
            np.array([logprob], dtype=np.float32),
            "",
            "length",
            self.version,
        )


def weights(bias: float, third: float = -3.0) -> dict[str, Tensor]:
    return {
        "steps": torch.tensor([-1.0, -2.0, third]),
        "bias": torch.tensor([bias]),
        "first": torch.ones(2, 2, dtype=torch.bfloat16),
    }


def as_sent(bucket: WeightBucket) -> WeightBucket:
    return bucket


@dataclass
class PlainRoute:
    """`alter` is what happens to a bucket on its way to engine 1; the others get it whole.

    rounding: what rounding changes in every log-prob of the trainer. planned: the rehearsals, whose
    layers are tensors.
    """

    trainer: PlainEngine
    engines: list[PlainEngine]
    alter: Callable[[WeightBucket], WeightBucket] = as_sent
    calls: list[str] = field(default_factory=list)
    name: str = "plain"
    rounding: float = 0.0025
    planned: tuple[Rehearsal, ...] = ()

    def renew(self) -> None:
        self.calls.append("renew")

    def rehearsals(self) -> Sequence[Rehearsal]:
        return self.planned

    def transfer(self, bucket_bytes: int, version: int, rehearsal: Rehearsal | None = None) -> int:
        self.calls.append(f"transfer {bucket_bytes} {version}")
        scaled = UNSCALED if rehearsal is None else rehearsal.scaled
        outgoing = self._scaled(scaled)
        for engine in self.engines:
            engine.arrivals = Arrivals(tuple(outgoing))
        sent = 0
        for names in PLAN:
            bucket = bucket_of({name: outgoing[name] for name in names})
            sent += bucket.bytes
            for index, engine in enumerate(self.engines):
                engine.receive(self.alter(bucket) if index == 1 else bucket)
        for engine in self.engines:
            engine.arrivals.complete()
            engine.version = version
        return sent

    def _scaled(self, scaled: Scaled) -> dict[str, Tensor]:
        weights = self.trainer.weights
        return weights | {name: weights[name] * scaled.factor for name in scaled.layers}

    def trainer_log_probs(
        self, sequences: Sequence[Ints], disturbance: Disturbance | None = None
    ) -> list[Floats]:
        assert disturbance is not None
        if disturbance.rounded_as is None:
            self.calls.append("trainer")
        model = PlainEngine(self._scaled(disturbance.scaled))
        model.noise = 0.0 if disturbance.rounded_as is None else self.rounding
        return model.log_probs(sequences)

    def engine_log_probs(self, sequences: Sequence[Ints]) -> list[list[Floats]]:
        self.calls.append("engines")
        return [engine.log_probs(sequences) for engine in self.engines]

    def engine_answers(self, prompts: Sequence[Ints]) -> list[list[Trajectory]]:
        return [[engine.answer(*p) for p in enumerate(prompts)] for engine in self.engines]


def make_route(alter: Callable[[WeightBucket], WeightBucket] = as_sent) -> PlainRoute:
    engines = [PlainEngine(weights(bias=0.0)), PlainEngine(weights(bias=0.0))]
    return PlainRoute(PlainEngine(weights(bias=-0.5)), engines, alter)


def sync(route: PlainRoute, bound: float | None = None) -> SyncReport:
    return sync_weights(WeightSync(route, 12, PROBE, "float32", 4.0, bound), 7)


def changed(name: str, value: Tensor) -> Callable[[WeightBucket], WeightBucket]:
    """Put another tensor in a bucket, with its right hash."""

    def alter(bucket: WeightBucket) -> WeightBucket:
        tensors = tensors_in(bucket)
        return bucket_of(tensors | {name: value}) if name in tensors else bucket

    return alter


def test_a_sync_is_proved_last_and_tells_its_bytes_and_seconds() -> None:
    route = make_route()
    report = sync(route)
    # 4 bytes of a bias, 12 of steps and 8 of two by two, each to a multiple of 8.
    assert report.rounding == pytest.approx(0.0025, rel=1e-4)
    assert report == SyncReport(
        7, 0.0, report.rounding, bytes=8 + 16 + 8, seconds=report.seconds, route="plain"
    )
    assert 0 < report.seconds < 10
    assert route.calls == ["transfer 12 7", "trainer", "engines"]
    for engine in route.engines:
        assert engine.version == 7
        assert all(torch.equal(engine.weights[n], t) for n, t in route.trainer.weights.items())


def test_a_dropped_tensor_is_named_before_anything_is_proved() -> None:
    def drop(bucket: WeightBucket) -> WeightBucket:
        return bucket_of({n: t for n, t in tensors_in(bucket).items() if n != "first"})

    route = make_route(drop)
    with pytest.raises(WeightSyncError, match=r"1 tensor .* never arrived: first\."):
        sync(route)
    assert route.calls == ["transfer 12 7"]


def test_damaged_bytes_stop_the_sync() -> None:
    def damage(bucket: WeightBucket) -> WeightBucket:
        damaged = bucket_of(tensors_in(bucket))
        bytes_of(damaged)[0] ^= 1
        return replace(bucket, handle=damaged.handle)

    route = make_route(damage)
    with pytest.raises(WeightSyncError, match="bias arrived damaged"):
        sync(route)


def test_a_stale_tensor_with_a_right_hash_is_caught_by_what_it_computes() -> None:
    route = make_route(changed("bias", torch.tensor([0.25])))
    with pytest.raises(WeightSyncError) as caught:
        sync(route)
    # The probe's tokens after the first are 0, 1 and 2: -1, -2, -3 and the bias, -0.5 or 0.25.
    message = str(caught.value)
    assert "rollout engine 1" in message and "weight sync 7" in message
    assert "3 probe tokens" in message
    assert re.search(r"-1\.75000 in the engine.*-2\.50000 in the trainer.* 0\.75 ", message)
    assert "(bound 0.01: rollout.sync.max_roundings" in message
    assert "All weights were sent once more before" in message
    again = ["transfer 12 7", "trainer", "engines"]
    assert route.calls == [*again, "renew", *again]


def test_the_worst_token_is_named_with_both_numbers() -> None:
    route = make_route(changed("steps", torch.tensor([-1.0, -2.0, -9.0])))
    with pytest.raises(WeightSyncError, match=r"worst token has -9\.50000 and -3\.50000"):
        sync(route)


def test_gaps_that_cancel_in_the_mean_are_caught_too() -> None:
    route = make_route(changed("steps", torch.tensor([-1.5, -1.5, -3.0])))
    with pytest.raises(WeightSyncError, match=r"mean absolute difference 0\.3333"):
        sync(route)


def test_a_gap_within_the_bound_is_reported_the_largest_of_all_engines() -> None:
    route = make_route(changed("steps", torch.tensor([-1.0, -2.0, -3.75])))
    assert sync(route, bound=0.26).gap == 0.25
    with pytest.raises(WeightSyncError, match=r"0\.25 \(bound"):
        sync(route, bound=0.24)


def test_not_a_number_is_no_agreement() -> None:
    route = make_route()
    route.engines[0].weights["bias"] = torch.tensor([float("nan")])
    with pytest.raises(WeightSyncError, match="rollout engine 0"):
        prove(WeightSync(route, 12, PROBE, "float32", 4.0, most=1e9), 0)


def test_a_fault_that_is_gone_when_all_is_sent_once_more_costs_no_run() -> None:
    route = make_route()
    buckets = iter([changed("bias", torch.tensor([0.25]))] * len(PLAN))
    route.alter = lambda bucket: next(buckets, as_sent)(bucket)
    assert sync(route).gap == 0.0
    assert route.calls.count("renew") == 1


def test_engines_get_weights_other_than_the_files_before_they_are_compared() -> None:
    """The trainer's bias is -0.5, that of the engines' files 0."""
    route = make_route()
    prepare_sync(route, SyncConfig(bucket_bytes=12), PROBE, "float32", send_first=True)
    assert route.calls[0] == "transfer 12 0"


def test_rounding_sets_the_bound_as_it_is_after_each_sync() -> None:
    route = make_route()
    for engine in route.engines:
        engine.noise = 0.009
    assert sync(route).gap == pytest.approx(0.009, rel=1e-3)
    route.rounding = 0.002
    with pytest.raises(WeightSyncError, match=r"bound 0\.008: .* 4 times the 0\.002 "):
        sync(route)


def test_the_rounding_of_a_log_prob_itself_is_never_a_fault() -> None:
    route = make_route()
    route.rounding = 0.0
    for engine in route.engines:
        engine.noise = 2e-6  # of log-probs of -2.5
    assert sync(route).rounding == pytest.approx(2.5 / 2**21)


def test_an_absolute_bound_holds_whatever_the_rounding() -> None:
    route = make_route()
    for engine in route.engines:
        engine.noise = 0.2
    assert sync(route, bound=0.21).gap == pytest.approx(0.2, rel=1e-3)
    with pytest.raises(WeightSyncError, match=r"rollout\.sync\.max_logprob_gap = 0\.1"):
        sync(route, bound=0.1)


REHEARSALS = (
    Rehearsal(Scaled(("bias",)), ()),
    Rehearsal(Scaled(("steps",)), ("bias",)),
    Rehearsal(UNSCALED, ("steps",)),
)


def rehearsed(route: PlainRoute) -> PlainRoute:
    route.planned = REHEARSALS
    route.trainer.weights |= {"bias": torch.tensor([0.0078125])}
    prepare_sync(route, SyncConfig(bucket_bytes=12), PROBE, "float32", send_first=True)
    return route


def test_a_rehearsal_ends_with_the_right_weights() -> None:
    route = rehearsed(make_route())
    assert [c for c in route.calls if c.startswith("transfer")] == [
        f"transfer 12 {version}" for version in (0, -2, -1, 0)
    ]
    for engine in route.engines:
        assert all(torch.equal(engine.weights[n], t) for n, t in route.trainer.weights.items())


def test_an_engine_that_ignores_a_tensor_is_found_though_the_bound_hides_it() -> None:
    """Its bias stays at 0, by less than the bound from the trainer's; 64 times as much shows."""
    route = make_route(changed("bias", torch.tensor([0.0])))
    with pytest.raises(WeightSyncError, match="rehearsal of the weight sync"):
        rehearsed(route)


def test_an_engine_that_samples_with_a_cache_of_older_weights_is_found() -> None:
    route = make_route()
    route.engines[1].cached = weights(bias=0.0)
    with pytest.raises(WeightSyncError, match="engine 1 does not sample"):
        rehearsed(route)


def test_rehearsals_are_left_out_on_request() -> None:
    route = make_route(changed("bias", torch.tensor([0.0])))
    route.planned, route.trainer.weights["bias"] = REHEARSALS, torch.tensor([0.0078125])
    config = SyncConfig(bucket_bytes=12, rehearse=False)
    prepare_sync(route, config, PROBE, "float32", send_first=True)
    assert [c for c in route.calls if c.startswith("transfer")] == ["transfer 12 0"]
