"""The bookkeeping of a weight sync, over a route made of plain dictionaries."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
import torch
from buckets import CPU, bucket_of, tensors_in
from torch import Tensor

from plimsoll.config.rollout import SyncConfig
from plimsoll.engine.channel import HostInlet
from plimsoll.engine.weights import WeightBucket, sum_pieces
from plimsoll.errors import WeightSyncError
from plimsoll.records import Floats, Ints
from plimsoll.rollout.sync import (
    Arrivals,
    SyncReport,
    WeightSync,
    prepare_sync,
    prove,
    sync_weights,
)

PLAN = (("bias",), ("steps", "first"))
PROBE: list[Ints] = [np.array([1, 0, 1]), np.array([2, 2])]


@dataclass
class PlainEngine:
    """A model whose log-prob of a token is `steps[token] + bias`, off by `noise`."""

    weights: dict[str, Tensor]
    noise: float = 0.0
    version: int = 0
    arrivals: Arrivals = field(default_factory=lambda: Arrivals(()))

    def receive(self, bucket: WeightBucket) -> None:
        data = HostInlet(CPU).open(bucket.handle, bucket.bytes)
        self.arrivals.take(bucket.tensors, sum_pieces(bucket.tensors, data))
        self.weights |= tensors_in(bucket)

    def log_probs(self, sequences: Sequence[Ints]) -> list[Floats]:
        steps, bias = self.weights["steps"].numpy(), self.weights["bias"].numpy()
        return [(steps[tokens[1:]] + bias + self.noise).astype(np.float32) for tokens in sequences]


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
    """`alter` is what happens to a bucket on its way to engine 1; the others get it whole."""

    trainer: PlainEngine
    engines: list[PlainEngine]
    alter: Callable[[WeightBucket], WeightBucket] = as_sent
    calls: list[str] = field(default_factory=list)
    name: str = "plain"

    def renew(self) -> None:
        """It opens no way."""

    def transfer(self, bucket_bytes: int, version: int) -> int:
        self.calls.append(f"transfer {bucket_bytes} {version}")
        for engine in self.engines:
            engine.arrivals = Arrivals(tuple(self.trainer.weights))
        sent = 0
        for names in PLAN:
            bucket = bucket_of({name: self.trainer.weights[name] for name in names})
            sent += bucket.bytes
            for index, engine in enumerate(self.engines):
                engine.receive(self.alter(bucket) if index == 1 else bucket)
        for engine in self.engines:
            engine.arrivals.complete()
            engine.version = version
        return sent

    def trainer_log_probs(self, sequences: Sequence[Ints]) -> list[Floats]:
        self.calls.append("trainer")
        return self.trainer.log_probs(sequences)

    def engine_log_probs(self, sequences: Sequence[Ints]) -> list[list[Floats]]:
        self.calls.append("engines")
        return [engine.log_probs(sequences) for engine in self.engines]


def make_route(alter: Callable[[WeightBucket], WeightBucket] = as_sent) -> PlainRoute:
    engines = [PlainEngine(weights(bias=0.0)), PlainEngine(weights(bias=0.0))]
    return PlainRoute(PlainEngine(weights(bias=-0.5)), engines, alter)


def sync(route: PlainRoute, bound: float = 0.01) -> SyncReport:
    return sync_weights(WeightSync(route, 12, PROBE, bound, "by the test"), 7)


def prepare(noise: float, most: float = 0.5, merged: bool = False) -> tuple[PlainRoute, WeightSync]:
    """Engines with the trainer's weights whose arithmetic is off by `noise` nats at every token."""
    route = make_route()
    for engine in route.engines:
        engine.noise = noise
    route.trainer.weights["bias"] = torch.tensor([0.0])
    config = SyncConfig(bucket_bytes=12, max_logprob_gap=most, max_gap_growth=3.0)
    return route, prepare_sync(route, config, PROBE, merged_in_bfloat16=merged)


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
    assert report == SyncReport(7, 0.0, bytes=8 + 16 + 8, seconds=report.seconds, route="plain")
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
        data = bucket.handle[0].copy()
        data[0] ^= 1
        return replace(bucket, handle=(data,))

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
    assert "(bound 0.01: by the test)" in message


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
        prove(WeightSync(route, 12, PROBE, 1e9, ""), 0)


def test_engines_get_weights_other_than_the_files_before_they_are_compared() -> None:
    """The trainer's bias is -0.5, that of the engines' files 0."""
    config = SyncConfig(max_logprob_gap=0.1)
    assert prepare_sync(make_route(), config, PROBE, send_first=True).bound == 2e-5
    with pytest.raises(WeightSyncError, match="max_logprob_gap"):
        prepare_sync(make_route(), config, PROBE)


def test_rounding_sets_the_bound_of_the_syncs_after_it() -> None:
    route, prepared = prepare(noise=0.01)
    assert prepared.bound == pytest.approx(0.03, rel=1e-4)
    route.trainer.weights["steps"] = torch.tensor([-1.0, -2.0, -3.05])
    assert sync_weights(prepared, 1).gap == pytest.approx(0.01, rel=1e-3)
    # Stale by 0.03 at each of the three tokens: far below the absolute bound.
    route.trainer.weights["bias"] = torch.tensor([-0.03])
    with pytest.raises(WeightSyncError, match=r"max_gap_growth = 3 times the 0\.01 "):
        prove(prepared, 2)


def test_engines_that_round_alike_are_held_to_the_last_digits_of_float32() -> None:
    route, prepared = prepare(noise=0.0)
    assert prepared.bound == 2e-5
    route.trainer.weights["bias"] = torch.tensor([1e-5])
    prove(prepared, 1)
    route.trainer.weights["bias"] = torch.tensor([4e-5])
    with pytest.raises(WeightSyncError, match="at least 2e-05"):
        prove(prepared, 2)


def test_an_adapter_merged_into_bfloat16_weights_rounds_though_the_first_weights_do_not() -> None:
    route, prepared = prepare(noise=0.0, merged=True)
    assert prepared.bound == 0.02
    route.trainer.weights["bias"] = torch.tensor([-0.01])
    prove(prepared, 1)
    route.trainer.weights["bias"] = torch.tensor([-0.04])
    with pytest.raises(WeightSyncError, match=r"at least 0\.02"):
        prove(prepared, 2)


def test_the_absolute_bound_holds_for_the_first_weights_and_whatever_the_rounding() -> None:
    route, prepared = prepare(noise=0.2)
    assert prepared.bound == 0.5
    route.trainer.weights["bias"] = torch.tensor([-0.4])
    with pytest.raises(WeightSyncError, match=r"rollout\.sync\.max_logprob_gap = 0\.5"):
        prove(prepared, 1)
    with pytest.raises(WeightSyncError, match=r"weight sync 0: .* 0\.2 \(bound 0\.1: "):
        prepare(noise=0.2, most=0.1)
