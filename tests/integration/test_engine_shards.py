"""Sequence parallelism: ranks that share packs learn what one rank learns from whole packs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from decided import decided_model
from engine_cases import RATES, Setting, make_batch, zero_stage
from engine_jobs import JOBS, Job
from engine_reference import (
    distance,
    named_as_saved,
    plain_adapted,
    plain_critic,
    plain_policy,
    plain_run,
    saved_weights,
    worst_error,
)
from pair_cases import with_prompts
from ranks import RankProcesses
from shortage_cases import Fault, Where, train_through
from test_engine_shortage import distance as mean_distance
from torch import Tensor
from transformers import PreTrainedConfig, Qwen3MoeConfig
from zero_cases import FORMS, RECOMPUTED, Recompute

from plimsoll.config.cluster import DecidedExchange
from plimsoll.config.engine import FrozenRole
from plimsoll.data.packing import pack_one
from plimsoll.model.load import load_policy
from plimsoll.model.policy import EmbeddingNoise, PackTensors
from plimsoll.model.routers import follow_sampler
from plimsoll.model.shards import open_shard
from plimsoll.model.tiny import tiny_config, write_tiny_model
from plimsoll.records import Pack, Sample
from plimsoll.trainer.process_group import Place, join
from plimsoll.trainer.worker import UpdateResult, Worker
from plimsoll.trainer.zero.config import FrozenZeroConfig

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Case:
    """One way to train on packs that ranks share.

    Attributes:
        job: What is learned; see JOBS.
        stage: ZeRO's.
        ranks: All ranks.
        shards: How many of them share a pack.
        budget: Tokens of a pack.
    """

    job: str
    stage: int
    ranks: int
    shards: int
    exchange: DecidedExchange
    form: str = "full"
    recompute: Recompute = "nothing"
    budget: int = 220

    def __str__(self) -> str:
        how = f"{self.ranks}/{self.shards} {self.exchange}"
        return f"{self.job} {how} stage {self.stage} {self.form} {self.recompute}"


BATCHES = tuple(make_batch((150, 30, 204, 92, 7, 110), seed, shared=5) for seed in (1, 2, 3))
"""Some sequences are longer than a rank's rows, and some ranks learn nothing of a pack."""
PAIR_BATCHES = tuple(
    with_prompts(make_batch((150, 30, 104, 92, 7, 110, 40, 41), seed)) for seed in (1, 2, 3)
)


def job_of(case: Case) -> Job:
    """Return the job with longer batches."""
    job = JOBS[case.job]
    pairs = case.job in ("dpo", "simpo", "rm", "kto")
    return replace(job, batches=PAIR_BATCHES if pairs else BATCHES)


def train(place: Place, case: Case, model: Path, other: Path, out: Path) -> list[UpdateResult]:
    """Take three steps, and save the model before and after them."""
    place = replace(place, shards=case.shards, exchange=case.exchange)
    worker, job = Worker(place), job_of(case)
    frozen = FrozenRole(model=decided_model(str(other), dtype="float32"))
    job.load_other(worker, frozen.with_engine(FrozenZeroConfig(stage=3 if case.stage == 3 else 0)))
    role = setting_of(case).role(model)
    job.load(worker, role)
    if role.adapter is not None:
        worker.save_model("actor", out / "first")
    results = []
    for batch, rate in zip(job.batches, RATES, strict=True):
        lesson = job.teach(worker, place, batch, case.budget // case.shards, True)
        learned = lesson.packs, lesson.columns, batch.counts, lesson.objective
        results.append(worker.train("actor", *learned, rate))
    worker.save_model("actor", out / "last")
    return results


def setting_of(case: Case) -> Setting:
    """Return the case in the words of the config."""
    return Setting(
        zero_stage(case.stage),
        checkpointing=RECOMPUTED[case.recompute],
        adapter=FORMS[case.form],
        quantization="nf4" if case.form.endswith("nf4") else "none",
    )


@pytest.fixture(scope="module")
def four_ranks() -> Iterator[RankProcesses]:
    processes = RankProcesses(4)
    yield processes
    processes.kill()


CASES = (
    Case("sft", 0, 2, 2, "heads"),
    Case("sft", 3, 4, 4, "keys", recompute="layers"),
    Case("policy", 2, 4, 2, "heads", recompute="parts"),
    Case("policy", 3, 4, 2, "keys", recompute="parts"),
    Case("policy", 0, 4, 4, "heads", form="lora"),
    Case("value", 1, 2, 2, "keys", recompute="layers"),
    Case("value", 3, 4, 4, "heads"),
    Case("dpo", 2, 4, 4, "keys"),
    Case("dpo", 3, 4, 2, "heads", form="lora", recompute="layers"),
    Case("kto", 0, 4, 4, "heads"),
    Case("kto", 2, 2, 2, "keys"),
    Case("rm", 3, 2, 2, "heads", recompute="parts"),
    Case("rm", 2, 4, 4, "keys"),
    Case("prm", 1, 4, 2, "keys"),
    Case("distill", 3, 4, 4, "keys"),
    Case("distill", 0, 2, 2, "heads"),
    Case("sft", 2, 2, 2, "heads", form="lora nf4", recompute="parts"),
    Case("policy", 3, 2, 2, "keys", form="lora nf4", recompute="layers"),
)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_ranks_that_share_packs_learn_the_same(
    case: Case,
    tied: Path,
    untied: Path,
    tmp_path: Path,
    two_ranks: RankProcesses,
    four_ranks: RankProcesses,
) -> None:
    pool = two_ranks if case.ranks == 2 else four_ranks
    results = pool.run(train, case, tied, untied, tmp_path)
    job = job_of(case)
    load = plain_critic if job.head == "value" else plain_policy
    base = load(tied, quantised=case.form.endswith("nf4"))
    adapted = case.form != "full"
    learner = plain_adapted(base, tmp_path / "first") if adapted else base
    wanted = plain_run(learner, job.plain(untied), job.batches, 1.0)
    wanted = named_as_saved(wanted) if adapted else wanted
    for stream in range(0, case.ranks, case.shards):  # all ranks of a stream report the same
        of_stream = results[stream : stream + case.shards]
        assert all(found == of_stream[0] for found in of_stream)
    assert worst_error(results[:: case.shards], wanted) < 5e-5
    assert distance(saved_weights(tmp_path / "last"), wanted) < 1e-4


@pytest.mark.parametrize(
    ("where", "exchange", "stage"), [("forward", "heads", 3), ("backward", "keys", 2)]
)
def test_memory_that_runs_out_on_one_of_the_ranks_that_share_a_pack(
    where: Where,
    exchange: DecidedExchange,
    stage: int,
    tied: Path,
    four_ranks: RankProcesses,
    tmp_path: Path,
) -> None:
    """The other ranks leave the step, and all take it anew with smaller packs."""
    batches = tuple(make_batch([3 + i % 7 for i in range(40)], seed) for seed in (1, 2))
    setting = Setting(zero_stage(stage), micro_batch_tokens=75)
    clean, spoilt = tmp_path / "clean", tmp_path / "spoilt"
    four_ranks.run(train_through, tied, setting, batches, (), clean, shards=2, exchange=exchange)
    fault = Fault(3, 1, 0, where, 30)  # the second rank of the second stream
    seen = four_ranks.run(
        train_through, tied, setting, batches, [fault], spoilt, shards=2, exchange=exchange
    )
    assert [survived.before for survived in seen] == [seen[0].before] * 4
    assert len(seen[0].before) == 1 and 75 < seen[0].before[0] <= 150
    assert mean_distance(clean, spoilt) < 1e-7


MODELS: Mapping[str, PreTrainedConfig] = {
    "window and softcap": tiny_config("gemma2", True, heads=8, kv_heads=2, window=40),
    "window": tiny_config("mistral", True, heads=8, kv_heads=4, window=40),
    "sinks": tiny_config("gpt_oss", False, heads=8, kv_heads=4, window=40),
    "heads that do not divide": tiny_config("llama", True, hidden=96, heads=6, kv_heads=3),
    "experts": Qwen3MoeConfig(
        vocab_size=256,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=16,
        moe_intermediate_size=32,
        num_experts=8,
        num_experts_per_tok=2,
    ),
}


def a_pack(routed: bool) -> Pack:
    """Return two pairs that share prompts; their borders lie within ranks' rows."""
    drawn, samples = np.random.default_rng(0), list[Sample]()
    for first in (0, 1000):
        for length in (180, 250):
            tokens = drawn.integers(0, 256, length)
            tokens[:130] = (np.arange(130) + first) % 256
            samples.append(
                Sample(tokens, (drawn.random(length) < 0.6) & (np.arange(length) >= 130))
            )
    pack = pack_one(samples, range(4), np.array([0, 130, 0, 130]))
    if not routed:
        return pack
    experts = [[drawn.permutation(8)[:2] for _ in range(2)] for _ in range(pack.tokens)]
    return replace(pack, routing_T=np.array(experts, np.uint8))


def differences(
    place: Place, model: Path, exchange: DecidedExchange, kind: str
) -> tuple[float, list[object]]:
    """Return by how much a gradient differs from that of the whole pack, and both pack's counts."""
    join(place)
    shard = open_shard(place.rank, place.ranks, place.ranks, exchange)
    pack = a_pack(kind == "experts")
    noise = EmbeddingNoise(5.0, tuple(np.diff(pack.cu_seqlens).tolist()), (7, 8, 9, 10))
    found, counts = list[list[Tensor]](), list[object]()
    for own in (None, shard):
        settings = decided_model(
            str(model), dtype="float32", gradient_checkpointing="selective" if own else False
        )
        policy = load_policy(settings, CPU)
        follow_sampler(policy.lm)
        policy.shard = own
        sent = PackTensors.from_pack(pack, CPU)
        output = policy(sent, entropy="loss", noise=noise)
        if sent.routing is not None:
            counts.append({name: int(n) for name, n in sent.routing.metrics().items()})
        (output.logprobs_L.square().sum() + output.entropy_L.sum()).backward()
        gradients = [p.grad for p in policy.parameters() if p.grad is not None]
        for gradient in gradients if own else ():
            dist.all_reduce(gradient)
        found.append(gradients)
    pairs = zip(*found, strict=True)
    return max(float((ours - whole).norm() / whole.norm()) for whole, ours in pairs), counts


@pytest.mark.parametrize(
    ("kind", "exchange"),
    [
        (kind, exchange)
        for kind in MODELS
        for exchange in ("heads", "keys")
        if (kind, exchange) != ("heads that do not divide", "heads")
    ],
)
def test_gradients_and_counts_are_those_of_whole_packs(
    kind: str, exchange: DecidedExchange, four_ranks: RankProcesses, tmp_path: Path
) -> None:
    """With noise on the embeddings, and selective checkpointing on the ranks that share."""
    write_tiny_model(tmp_path, MODELS[kind], seed=0, tokenizer=None)
    for difference, counts in four_ranks.run(differences, tmp_path, exchange, kind):
        assert difference < 1e-5
        assert counts[:1] == counts[1:]
        assert bool(counts) == (kind == "experts")


def fill_of(place: Place, case: Case, model: Path, other: Path, out: Path) -> list[float]:
    """Take a step, with votes, of which one stream has a pack without a learned token."""
    place = replace(place, shards=case.shards, exchange=case.exchange)
    worker, job = Worker(place), job_of(case)
    frozen = FrozenRole(model=decided_model(str(other), dtype="float32"))
    job.load_other(worker, frozen.with_engine(FrozenZeroConfig(stage=0)))
    job.load(worker, setting_of(case).role(model))
    batch = make_batch((60, 60), 1) if case.job == "dpo" else make_batch((60, 60, 60), 1)
    lesson = job.teach(worker, place, batch, 60 if case.job == "dpo" else 50, False)
    learned = lesson.packs, lesson.columns, batch.counts, lesson.objective
    result = worker.try_to_train("actor", *learned, RATES[0])
    assert isinstance(result, UpdateResult)
    return [pack.loss_tokens for pack in lesson.packs]


@pytest.mark.parametrize("job", ["policy", "dpo", "value"])
def test_a_stream_with_nothing_to_learn_votes_as_often_as_the_others(
    job: str, tied: Path, untied: Path, tmp_path: Path, four_ranks: RankProcesses
) -> None:
    """Else all ranks would wait for one another."""
    case = Case(job, 2, 4, 2, "heads")
    learned = four_ranks.run(fill_of, case, tied, untied, tmp_path)
    assert 0 in {tokens for of_rank in learned for tokens in of_rank}
