"""Weights from a real trainer to a real vLLM engine, whole and broken on purpose."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from buckets import Altered, bucket_of, open_way, tensors_in
from decided import decided_model, decided_role
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
from vllm_cases import started

from plimsoll.commands.demo import ALPHABET, make_tokenizer
from plimsoll.config.engine import OptimizerConfig, TrainedRole
from plimsoll.config.rollout import RolloutConfig, SamplingConfig, SyncConfig
from plimsoll.data.packing import pack
from plimsoll.errors import WeightSyncError
from plimsoll.machine.host import free_port
from plimsoll.model.disturbance import Disturbance, Scaled
from plimsoll.model.tiny import tiny_config, write_tiny_model
from plimsoll.records import (
    BatchCounts,
    Floats,
    Ints,
    Pack,
    Prompt,
    Sample,
    Trajectory,
    from_packed,
)
from plimsoll.sampler.protocol import EngineSpec, Request
from plimsoll.sampler.vllm.config import VllmConfig
from plimsoll.sampler.vllm.engine import VllmEngine
from plimsoll.sync.buckets import WeightBucket
from plimsoll.sync.proof import Rehearsal, SyncReport, WeightSync, prepare_sync, prove, sync_weights
from plimsoll.trainer.objectives import NllObjective
from plimsoll.trainer.process_group import Place
from plimsoll.trainer.worker import Worker

pytestmark = pytest.mark.engine

TEMPERATURE = 0.7
BOUND = 0.05
RNG = np.random.default_rng(0)
PROBE: list[Ints] = [RNG.integers(0, 15, 24) for _ in range(4)]
PREFILLED, PREFILL_TOKENS, NEW_TOKENS = 100, 100, 4
STALE = "model.layers.1.mlp.down_proj.weight"

BOTH_NUMBERS = (
    r"rollout engine 0 does not compute what the trainer computes after weight sync \d: over 92 "
    r"probe tokens the mean log-prob is -\d+\.\d{5} in the engine and -\d+\.\d{5} in the trainer"
)

Alter = Callable[[WeightBucket], WeightBucket]


def whole(bucket: WeightBucket) -> WeightBucket:
    return bucket


@dataclass(frozen=True)
class Pair:
    """A trainer and an engine in this process; a `WeightRoute` between them.

    withheld: a tensor that the trainer forgets altogether. alter: what happens to the buckets.
    only_trained: leave out what does not learn. published: how the engine names weights.
    """

    worker: Worker
    engine: VllmEngine
    loop: asyncio.Runner
    withheld: str | None = None
    alter: Alter = whole
    name: str = "host"
    only_trained: bool = False
    published: bool = True

    def renew(self) -> None:
        """It opens no way."""

    def rehearsals(self) -> Sequence[Rehearsal]:
        return self.worker.rehearsals("actor")

    def transfer(self, bucket_bytes: int, version: int, rehearsal: Rehearsal | None = None) -> int:
        layers, scaled = None, Scaled()
        if rehearsal is not None:
            layers, scaled = rehearsal.layers, rehearsal.scaled
        arguments = "actor", bucket_bytes, self.published, self.only_trained, layers
        plan = self.worker.weight_plan(*arguments)
        channel = self.worker.open_channel("host", plan.largest, True, 1)
        assert channel is not None
        self.worker._outlet = Altered(self.worker._outlet, self.altered)
        announced = tuple(name for name in plan.names if name != self.withheld)
        self.loop.run(self.engine.begin_sync(announced, [channel]))
        for planned in plan.buckets:
            self.worker.weight_bucket("actor", planned, self.published, scaled)
            self.loop.run(self.engine.receive())
        self.loop.run(self.engine.end_receiving())
        self.worker.rest_channel()
        self.loop.run(self.engine.finish_sync(version))
        return sum(plan.sizes)

    def altered(self, bucket: WeightBucket) -> WeightBucket:
        whole = bucket if self.withheld is None else without(self.withheld)(bucket)
        return self.alter(whole)

    def trainer_log_probs(
        self, sequences: Sequence[Ints], disturbance: Disturbance | None = None
    ) -> list[Floats]:
        [packs] = pack([learned_after(1, tokens) for tokens in sequences], 1, 256)
        found = self.worker.probe_log_probs("actor", packs, disturbance)
        return from_packed(packs, found)

    def engine_log_probs(self, sequences: Sequence[Ints]) -> list[list[Floats]]:
        return [self.loop.run(self.engine.log_probs(sequences))]

    def engine_answers(self, prompts: Sequence[Ints]) -> list[list[Trajectory]]:
        asked = tuple(Prompt(i, tokens, "") for i, tokens in enumerate(prompts))
        request = Request(asked, 1, SamplingConfig(max_new_tokens=4), seed=0)
        return [self.loop.run(self.engine.generate(request))]

    def skip_unless_stale(self) -> None:
        """Skip the test if the engine is right after a transfer without what is withheld: on CPUs
        without AVX-512 vLLM packs no head."""
        self.transfer(2**20, 0)
        [sampled] = self.engine_log_probs(PROBE)
        gap = np.abs(np.concatenate(sampled) - np.concatenate(self.trainer_log_probs(PROBE))).mean()
        if gap < BOUND:
            pytest.skip("vLLM keeps no packed copy of the head on this CPU")

    def sync(self, version: int) -> SyncReport:
        return sync_weights(self.proved_within(BOUND), version)

    def proved_within(self, bound: float) -> WeightSync:
        return WeightSync(self, 20_000, PROBE, "bfloat16", 4.0, most=bound)

    def tensor(self, name: str) -> torch.Tensor:
        """A copy of one of the trainer's weights as it is now."""
        [planned] = open_way(self.worker, 2**30, True).buckets
        bucket = self.worker.weight_bucket("actor", planned, True)
        assert bucket is not None
        return tensors_in(bucket)[name].clone()


def learned_after(prompt: int, tokens: Ints) -> Sample:
    return Sample(tokens, np.arange(len(tokens)) >= prompt)


def packs_of(found: Sequence[Trajectory]) -> list[Pack]:
    """Return packs of the prompts, each with its response to learn."""
    rows = [
        learned_after(len(t.prompt.tokens), np.concatenate([t.prompt.tokens, t.response_tokens]))
        for t in found
    ]
    [packs] = pack(rows, 1, 256)
    return packs


def without(name: str) -> Alter:
    def alter(bucket: WeightBucket) -> WeightBucket:
        tensors = tensors_in(bucket)
        kept = {n: t for n, t in tensors.items() if n != name}
        return bucket if kept.keys() == tensors.keys() else bucket_of(kept)

    return alter


def instead(name: str, value: torch.Tensor) -> Alter:
    """Another value under the name, with that value's own right hash."""

    def alter(bucket: WeightBucket) -> WeightBucket:
        tensors = tensors_in(bucket)
        return bucket_of(tensors | {name: value}) if name in tensors else bucket

    return alter


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    """The engine loads what the trainer saved after its first steps."""
    home = tmp_path_factory.mktemp("sync")
    with trainer(home, "bfloat16") as worker:
        train(worker, rng=RNG)
        worker.save_model("actor", home / "saved")
        with engine_beside(worker, home / "saved", "bfloat16") as pair:
            yield pair


@contextmanager
def trainer(home: Path, dtype: Literal["bfloat16", "float32"]) -> Iterator[Worker]:
    config = tiny_config("qwen2", True, vocab=64, hidden=64, heads=2, feed_forward=96)
    write_tiny_model(home / "first", config, 0, make_tokenizer())
    model = decided_model(path=str(home / "first"), dtype=dtype)
    role = decided_role(TrainedRole(model=model, optimizer=OptimizerConfig(max_grad_norm=0)))
    worker = Worker(Place(0, 1, "127.0.0.1", free_port(), "cpu", 1))
    worker.load_model("actor", role, TEMPERATURE)
    yield worker
    worker.stop()


@contextmanager
def engine_beside(
    worker: Worker, model: Path, dtype: Literal["bfloat16", "float32"], stages: int = 1
) -> Iterator[Pair]:
    rollout = RolloutConfig(dtype=dtype).with_engine(
        VllmConfig(cpu_kv_cache_gib=0.25, pipeline_parallel=stages)
    )
    longest = PREFILL_TOKENS + NEW_TOKENS
    with started(EngineSpec(0, str(model), longest, 1, "cpu", rollout)) as (engine, loop):
        yield Pair(worker, engine, loop)


def train(worker: Worker, rate: float = 0.05, rng: np.random.Generator | None = None) -> None:
    """Three real steps; by default they move every weight far enough for any stale one to show.

    rng: what draws the rows; None: the same rows each time.
    """
    rng = np.random.default_rng(0) if rng is None else rng
    rows = [learned_after(1, rng.integers(0, 15, 24)) for _ in range(8)]
    [packs] = pack(rows, 1, 256)
    counts = BatchCounts(sum(int(row.loss_mask.sum()) for row in rows), len(rows))
    for _ in range(3):
        worker.train("actor", packs, [{}] * len(packs), counts, NllObjective(), rate)


def test_the_saved_model_in_vllm_gives_the_trainers_log_probs(pair: Pair) -> None:
    assert prove(pair.proved_within(BOUND), 0).gap < 0.02


def test_trained_weights_arrive(pair: Pair) -> None:
    train(pair.worker, rng=RNG)
    with pytest.raises(WeightSyncError):
        prove(pair.proved_within(BOUND), 1)  # the training moved the weights by more than rounding
    assert pair.sync(1).gap < 0.02


def test_vllm_completes_a_layer_before_the_next_one_begins(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It holds tensors until all of their layer are there, so no other may be begun meanwhile; and
    a bucket of all of an attention's or an MLP's leaves none unfinished."""
    open_layers, receive = [], VllmEngine.receive

    async def look(engine: VllmEngine) -> None:
        await receive(engine)
        [[count]] = [await engine._llm.collective_rpc(unfinished)]
        open_layers.append(count)

    monkeypatch.setattr(VllmEngine, "receive", look)
    report = pair.sync(1)
    assert len(open_layers) > 4 and max(open_layers) <= 1 and report.seconds > 0
    open_layers.clear()
    assert sync_weights(replace(pair.proved_within(BOUND), bucket_bytes=50_000), 2).gap < 0.02
    assert len(open_layers) > 2 and not any(open_layers)


def unfinished(worker: Any) -> int:
    """Layers of a vLLM worker's model that hold new tensors and wait for more."""
    layers = map(get_layerwise_info, worker.model_runner.get_model().modules())
    return sum(bool(layer.loaded_weights) for layer in layers)


def test_weights_on_their_way_lie_in_no_file_that_a_kill_would_leave(pair: Pair) -> None:
    lying = list[Path]()

    def look(bucket: WeightBucket) -> WeightBucket:
        lying.append(Path(bucket.handle[0]).readlink())
        return bucket

    replace(pair, alter=look).sync(1)
    assert lying and not any(path.exists() for path in lying)


def test_the_samplers_log_probs_are_the_trainers_at_the_sampling_temperature(pair: Pair) -> None:
    train(pair.worker, rng=RNG)
    pair.sync(2)
    prompts = tuple(Prompt(i, RNG.integers(0, 15, 4 + i), "") for i in range(6))
    sampling = SamplingConfig(max_new_tokens=20, temperature=TEMPERATURE)
    found = pair.loop.run(pair.engine.generate(Request(prompts, 2, sampling, seed=1)))
    order = [(t.prompt.index, t.sample_index) for t in found]
    assert order == [(i, k) for i in range(6) for k in range(2)]
    assert {v for t in found for v in t.weight_versions} == {2}
    packs = packs_of(found)
    expected = from_packed(packs, pair.worker.log_probs("actor", packs))
    gaps = np.concatenate(
        [np.abs(t.sampler_logprobs - e) for t, e in zip(found, expected, strict=True)]
    )
    assert len(gaps) > 60 and gaps.mean() < 0.02
    at_one = from_packed(packs, pair.worker.probe_log_probs("actor", packs))
    sampled = np.concatenate([t.sampler_logprobs for t in found])
    assert np.abs(sampled - np.concatenate(at_one)).mean() > 0.1


def test_prompts_beyond_one_prefill_are_sampled_with_their_seeds(pair: Pair) -> None:
    """vLLM is given more prompt tokens at once than it prefills in one go."""
    rng = np.random.default_rng(0)
    prompts = tuple(
        Prompt(i, rng.integers(len(ALPHABET), size=PREFILL_TOKENS), "") for i in range(PREFILLED)
    )
    request = Request(prompts, 1, SamplingConfig(max_new_tokens=NEW_TOKENS), seed=3)
    first, second = (pair.loop.run(pair.engine.generate(request)) for _ in range(2))
    assert [t.prompt.index for t in first] == list(range(PREFILLED))
    assert all(1 <= len(t.response_tokens) <= NEW_TOKENS for t in first)
    assert len({tuple(t.response_tokens) for t in first}) > PREFILLED // 2
    same = [
        np.array_equal(a.response_tokens, b.response_tokens)
        for a, b in zip(first, second, strict=True)
    ]
    assert sum(same) >= 0.9 * PREFILLED  # the second time prefixes are cached: other rounding


def test_a_tied_head_that_is_not_sent_is_caught_by_what_the_engine_computes(pair: Pair) -> None:
    train(pair.worker, rng=RNG)
    forgetful = replace(pair, withheld="lm_head.weight")
    forgetful.skip_unless_stale()
    with pytest.raises(WeightSyncError, match=BOTH_NUMBERS):
        forgetful.sync(3)
    assert pair.sync(3).gap < 0.02


def test_a_stale_tensor_with_a_right_hash_is_caught_by_what_the_engine_computes(
    pair: Pair,
) -> None:
    old = pair.tensor(STALE)
    train(pair.worker, rng=RNG)
    with pytest.raises(WeightSyncError, match=BOTH_NUMBERS):
        replace(pair, alter=instead(STALE, old)).sync(4)
    assert pair.sync(4).gap < 0.02


def test_a_dropped_tensor_is_named(pair: Pair) -> None:
    train(pair.worker, rng=RNG)
    with pytest.raises(WeightSyncError, match=f"1 tensor .* never arrived: {STALE}"):
        replace(pair, alter=without(STALE)).sync(5)


@pytest.mark.slow
def test_one_stale_tensor_at_a_small_learning_rate_is_caught_in_float32(tmp_path: Path) -> None:
    """Its gap is a hundredth of the absolute bound, but many times the rounding."""
    with (
        trainer(tmp_path, "float32") as worker,
        engine_beside(worker, tmp_path / "first", "float32") as pair,
    ):
        prepared = prepare_sync(pair, SyncConfig(bucket_bytes=20_000), PROBE, "float32")
        old = pair.tensor(STALE)
        train(worker, rate=1e-4)
        report = sync_weights(prepared, 1)
        assert report.gap < report.rounding < 2e-5
        broken = replace(pair, alter=instead(STALE, old))
        with pytest.raises(WeightSyncError, match="max_roundings") as caught:
            sync_weights(replace(prepared, route=broken), 2)
        gap = re.search(r"mean absolute difference (\S+)", str(caught.value))
        assert gap is not None and float(gap[1]) < BOUND / 20


@pytest.mark.slow
def test_each_stage_of_an_engine_takes_its_own_layers(tmp_path: Path) -> None:
    """Two processes of a layer each, both with the tied embedding."""
    with (
        trainer(tmp_path, "float32") as worker,
        engine_beside(worker, tmp_path / "first", "float32", stages=2) as pair,
    ):
        train(worker)
        with pytest.raises(WeightSyncError):
            prove(pair.proved_within(1e-4), 1)
        assert sync_weights(pair.proved_within(1e-4), 1).gap < 1e-5
        first, second = pair.loop.run(pair.engine._llm.collective_rpc(plain_parameters))
        norms = ("input_layernorm.weight", "post_attention_layernorm.weight")
        table = "model.embed_tokens.weight"
        assert set(first) == {table, *(f"model.layers.0.{norm}" for norm in norms)}
        last = {table, "model.norm.weight"}
        assert set(second) == {*last, *(f"model.layers.1.{norm}" for norm in norms)}
        for name, found in [*first.items(), *second.items()]:
            assert found == pair.tensor(name).numpy().tobytes()
        sampling = SamplingConfig(max_new_tokens=20, temperature=TEMPERATURE)
        prompts = tuple(Prompt(i, RNG.integers(0, 15, 4 + i), "") for i in range(6))
        found = pair.loop.run(pair.engine.generate(Request(prompts, 2, sampling, seed=1)))
        packs = packs_of(found)
        expected = from_packed(packs, worker.log_probs("actor", packs))
        for trajectory, wanted in zip(found, expected, strict=True):
            np.testing.assert_allclose(trajectory.sampler_logprobs, wanted, atol=1e-4)


def plain_parameters(worker: Any) -> dict[str, bytes]:
    """Return the parameters of a vLLM worker's model that have transformers' form: embedding and
    norms."""
    named = worker.model_runner.get_model().named_parameters()
    plain = ("norm.weight", "embed_tokens.weight")
    return {name: p.detach().numpy().tobytes() for name, p in named if name.endswith(plain)}
