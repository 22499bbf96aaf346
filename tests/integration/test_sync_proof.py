"""Which faults of a weight sync are found, with real engines: each is put in on purpose.

A fault that an engine has always, such as a packed copy that stays old, is found before the first
step, however little the run will change the weights. Each test brings the engine back at its end.
"""

from __future__ import annotations

from asyncio import Runner
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
from buckets import bucket_of, tensors_in
from decided import decided_model, decided_role
from test_run_sync import TEMPERATURE, Pair, train
from torch import Tensor
from vllm_cases import started

from plimsoll.commands.demo import make_tokenizer
from plimsoll.config.engine import AdapterConfig, OptimizerConfig, TrainedRole
from plimsoll.config.rollout import RolloutConfig, SyncConfig
from plimsoll.errors import WeightSyncError
from plimsoll.machine.host import free_port
from plimsoll.model.disturbance import Disturbance
from plimsoll.model.tiny import tiny_config, write_tiny_model
from plimsoll.records import Ints
from plimsoll.sampler.protocol import EngineSpec
from plimsoll.sampler.transformers.config import TransformersConfig
from plimsoll.sampler.transformers.engine import TransformersEngine
from plimsoll.sampler.vllm.config import VllmConfig
from plimsoll.sampler.vllm.engine import VllmEngine
from plimsoll.sync.buckets import WeightBucket
from plimsoll.sync.proof import WeightSync, prepare_sync, sync_weights
from plimsoll.trainer.process_group import Place
from plimsoll.trainer.worker import Worker

pytestmark = pytest.mark.engine

Precision = Literal["bfloat16", "float32"]
Alter = Callable[[WeightBucket], WeightBucket]

RNG = np.random.default_rng(0)
PROBE: list[Ints] = [RNG.integers(0, 15, 40) for _ in range(6)]
BUCKET = 2**20
KINDS = (
    "self_attn.q_proj",
    "self_attn.k_proj",
    "self_attn.v_proj",
    "self_attn.o_proj",
    "mlp.gate_proj",
    "mlp.up_proj",
    "mlp.down_proj",
)
HEAD, TABLE = "lm_head.weight", "model.embed_tokens.weight"


@dataclass(frozen=True)
class Stale:
    """Keeps of each tensor whose name ends so what came first, with its right checksum."""

    ends: tuple[str, ...]
    first: dict[str, Tensor] = field(default_factory=dict)

    def __call__(self, bucket: WeightBucket) -> WeightBucket:
        tensors = tensors_in(bucket)
        for name in tensors:
            if name.endswith(self.ends):
                tensors[name] = self.first.setdefault(name, tensors[name].clone())
        return bucket_of(tensors)


def stale(pair: Pair, *ends: str) -> Pair:
    """An engine that has these tensors and takes no others."""
    fault = Stale(ends)
    replace(pair, alter=fault).transfer(BUCKET, 0)
    return replace(pair, alter=fault)


def swap(one: str, other: str) -> Alter:
    """Exchange two tensors, where a bucket has both."""

    def alter(bucket: WeightBucket) -> WeightBucket:
        tensors = tensors_in(bucket)
        if one not in tensors or other not in tensors:
            return bucket
        return bucket_of(tensors | {one: tensors[other], other: tensors[one]})

    return alter


@contextmanager
def trainer(
    model: Path, dtype: Precision, adapter: AdapterConfig | None = None
) -> Iterator[Worker]:
    role = TrainedRole(
        model=decided_model(path=str(model), dtype=dtype),
        adapter=adapter,
        optimizer=OptimizerConfig(max_grad_norm=0),
    )
    worker = Worker(Place(0, 1, "127.0.0.1", free_port(), "cpu", 1))
    worker.load_model("actor", decided_role(role), TEMPERATURE, seed=1)
    yield worker
    worker.stop()


@contextmanager
def engine_on(kind: str, model: Path, dtype: Precision) -> Iterator[tuple[Any, Runner]]:
    rollout = RolloutConfig(dtype=dtype)
    if kind == "transformers":
        spec = EngineSpec(
            0, str(model), 64, 1, "cpu", rollout.with_engine(TransformersConfig(max_sequences=8))
        )
        with Runner() as loop:
            yield TransformersEngine(spec), loop
    else:
        blocks = VllmConfig(cpu_kv_cache_gib=0.25, arguments={"block_size": 32})
        with started(EngineSpec(0, str(model), 64, 1, "cpu", rollout.with_engine(blocks))) as both:
            yield both


AT_ONCE = (("vllm", "bfloat16", "new"), ("transformers", "float32", "trained"))
CASES = [*product(("vllm", "transformers"), ("bfloat16", "float32"), ("new", "trained"))]


@pytest.fixture(
    scope="module",
    params=[c if c in AT_ONCE else pytest.param(c, marks=pytest.mark.slow) for c in CASES],
    ids=["-".join(case) for case in CASES],
)
def state(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Pair]:
    """A trainer and an engine of a model, before or after training, with the same weights."""
    kind, dtype, stage = request.param
    model = write_model(tmp_path_factory.mktemp("proof") / "model")
    with trainer(model, dtype) as worker, engine_on(kind, model, dtype) as (engine, loop):
        pair = Pair(worker, engine, loop, published=kind == "vllm")
        if stage == "trained":
            train(worker, rate=1e-3)
            pair.transfer(BUCKET, 1)
        yield pair


def write_model(path: Path) -> Path:
    config = tiny_config("qwen2", True, vocab=64, hidden=64, heads=2, feed_forward=96)
    config.initializer_range = 0.3  # far from uniform, so that each weight matters
    write_tiny_model(path, config, 0, make_tokenizer())
    return path


def prepared(pair: Pair) -> WeightSync:
    return prepare_sync(pair, SyncConfig(bucket_bytes=BUCKET), PROBE, dtype_of(pair))


def dtype_of(pair: Pair) -> str:
    return str(pair.worker._engine("actor").module.lm.dtype).removeprefix("torch.")


def brought_back(pair: Pair) -> bool:
    pair.transfer(BUCKET, 0)
    return prepared(pair).most is None


@pytest.mark.parametrize("kind", KINDS)
def test_layers_of_a_kind_that_stay_old_are_found_before_the_first_step(
    kind: str, state: Pair
) -> None:
    with pytest.raises(WeightSyncError, match=rf"rehearsal .*{kind}"):
        prepared(stale(state, f"{kind}.weight"))
    assert brought_back(state)


def test_a_tied_table_that_stays_old_is_found_before_the_first_step(state: Pair) -> None:
    with pytest.raises(WeightSyncError, match=r"rehearsal .*embed_tokens"):
        prepared(stale(state, HEAD, TABLE))
    assert brought_back(state)


def test_a_packed_head_that_stays_old_is_found_before_the_first_step(state: Pair) -> None:
    """On CPU vLLM packs a tied head anew only if a tensor of its name comes."""
    if not state.published:
        pytest.skip("transformers' model has one tensor of both names")
    forgetful = replace(state, withheld=HEAD)
    if packs_heads(forgetful):
        with pytest.raises(WeightSyncError, match=r"rehearsal .*embed_tokens"):
            prepared(forgetful)
    assert brought_back(state)


def packs_heads(forgetful: Pair) -> bool:
    """Return whether the engine keeps a packed head, as vLLM does on CPUs with AVX-512."""
    [table] = [r for r in forgetful.rehearsals() if "embed" in "".join(r.scaled.layers)]
    forgetful.transfer(BUCKET, 0, table)
    expected = forgetful.trainer_log_probs(PROBE, Disturbance(scaled=table.scaled))
    [found] = forgetful.engine_log_probs(PROBE)
    forgetful.transfer(BUCKET, 0)
    return bool(np.abs(np.concatenate(found) - np.concatenate(expected)).mean() > 1)


@pytest.mark.parametrize(
    "names",
    [("layers.1.mlp.gate_proj", "layers.1.mlp.up_proj"), ("layers.0.self_attn.q_proj",) * 2],
    ids=["gate and up", "two layers"],
)
def test_swapped_tensors_are_found(names: tuple[str, str], state: Pair) -> None:
    one, other = (f"model.{name}.weight" for name in names)
    if one == other:
        one = one.replace(".0.", ".1.")
    swapped = replace(state, alter=swap(one, other))
    with pytest.raises(WeightSyncError, match="All weights were sent once more"):
        sync_weights(prepared_plain(swapped), 3)
    assert brought_back(state)


def prepared_plain(pair: Pair) -> WeightSync:
    return WeightSync(pair, BUCKET, PROBE, dtype_of(pair), 4.0)


def test_a_cache_of_old_weights_is_found_before_the_first_step(
    state: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not state.published:
        pytest.skip("the engine on transformers keeps no cache between requests")

    async def keep(engine: VllmEngine) -> None:
        """Keep the prefixes that are cached."""

    monkeypatch.setattr(VllmEngine, "_forget_prefixes", keep)
    with pytest.raises(WeightSyncError, match="does not sample with"):
        prepared(state)
    monkeypatch.undo()
    assert brought_back(state)


def test_right_syncs_are_not_refused(state: Pair) -> None:
    sync = prepared(state)
    for version in range(1, 11):
        train(state.worker, rate=1e-3)
        report = sync_weights(sync, version)
        assert report.gap < 2 * report.rounding


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_an_adapter_merged_by_half_is_found(dtype: Precision, tmp_path: Path) -> None:
    model = write_model(tmp_path / "model")
    adapter = AdapterConfig(rank=4, targets=("q_proj", "down_proj"))
    with (
        trainer(model, dtype, adapter) as worker,
        engine_on("transformers", model, dtype) as (engine, loop),
    ):
        pair = Pair(worker, engine, loop, published=False, only_trained=True)
        sync = prepared(pair)
        base = Stale(("q_proj.weight", "down_proj.weight"))
        replace(pair, alter=base).transfer(BUCKET, 0)

        def halve(bucket: WeightBucket) -> WeightBucket:
            tensors = tensors_in(bucket)
            return bucket_of({n: (t + base.first.get(n, t)) / 2 for n, t in tensors.items()})

        train(worker, rate=0.02)
        with pytest.raises(WeightSyncError, match="does not compute what"):
            sync_weights(replace(sync, route=replace(pair, alter=halve)), 1)
        report = sync_weights(sync, 2)
        assert report.gap < 2 * report.rounding
