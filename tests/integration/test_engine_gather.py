"""Weights on their way out: every parameter once, in buckets, true, and never more than a bucket
of them whole on one rank."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import xxhash
from buckets import gathered, open_way, tensors_in
from engine_cases import (
    BATCHES,
    RATES,
    VOCAB,
    Setting,
    own_packs,
    policy_step,
    train_sft_gathering,
)
from engine_reference import (
    distance,
    plain_policy,
    plain_run,
    saved_weights,
    sft_loss,
    worst_error,
)
from ranks import RankProcesses
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

from plimsoll.commands.demo import make_tokenizer
from plimsoll.config.engine import FrozenRole
from plimsoll.model.load import load_policy
from plimsoll.model.policy import PackTensors
from plimsoll.model.tiny import tiny_config, write_tiny_model
from plimsoll.run.readings import DividedShare
from plimsoll.sync.buckets import WeightBucket
from plimsoll.trainer.process_group import Place, join
from plimsoll.trainer.protocol import Engine
from plimsoll.trainer.weights import WeightPlan, plan_buckets
from plimsoll.trainer.worker import Worker
from plimsoll.trainer.zero.config import FrozenZeroConfig, ZeroConfig
from plimsoll.trainer.zero.engine import ZeroEngine
from plimsoll.trainer.zero.frozen import FrozenZeroEngine

CPU = torch.device("cpu")
BUCKET = 900_000
"""Bytes. Of the fp32 model's tensors, the largest has 450,560, so two fit, and three do not."""
SMALL = 100_000
"""Bytes: less than most matrices have."""
PERSISTENT = 100_000
"""Elements: `stage3_param_persistence_threshold`; what has no more stays whole on every rank."""


@dataclass(frozen=True)
class Sent:
    plan: WeightPlan
    buckets: tuple[WeightBucket | None, ...]
    shares: tuple[DividedShare, ...]


def send_weights(
    place: Place, model: Path, setting: Setting, bucket_bytes: int, out: Path
) -> list[Sent]:
    """The buckets before and after a step, and once more after another; then the saved model."""
    worker = Worker(place)
    worker.load_model("actor", setting.role(model), temperature=1.0)
    sent = []
    for step in range(3):
        plan = open_way(worker, bucket_bytes)
        buckets = tuple(gathered(worker, planned) for planned in plan.buckets)
        sent.append(Sent(plan, buckets, worker.shares()))
        if step < 2:
            policy_step(worker, place, BATCHES[step], 31, RATES[step])
    worker.save_model("actor", out)
    return sent


ALL_CPU = ZeroConfig(stage=3, optimizer_offload="cpu", parameter_offload="cpu")


@pytest.mark.parametrize(
    ("setting", "is_tied", "bucket_bytes"),
    [
        (Setting(ZeroConfig(stage=2)), True, BUCKET),
        (Setting(ZeroConfig(stage=3)), True, SMALL),
        (Setting(ZeroConfig(stage=3), "bfloat16"), False, BUCKET),
        (Setting(ALL_CPU, "bfloat16"), True, BUCKET),
    ],
    ids=["zero-2-tied", "zero-3-tied-small", "zero-3-untied-bf16", "zero-3-all-cpu-bf16"],
)
def test_the_buckets_hold_the_model(
    setting: Setting,
    is_tied: bool,
    bucket_bytes: int,
    tied: Path,
    untied: Path,
    tmp_path: Path,
    two_ranks: RankProcesses,
) -> None:
    model = tied if is_tied else untied
    first, second = two_ranks.run(send_weights, model, setting, bucket_bytes, tmp_path / "saved")
    assert all(bucket is None for sent in second for bucket in sent.buckets)
    assert [sent.plan for sent in first] == [sent.plan for sent in second]

    before = load_file(model / "model.safetensors")
    after = load_file(tmp_path / "saved" / "model.safetensors")
    check_values(first[0], before, is_tied)
    check_values(first[2], after, is_tied)
    changed = [tensors_of(sent)["model.embed_tokens.weight"] for sent in first]
    assert not torch.equal(changed[0], changed[1]) and not torch.equal(changed[1], changed[2])
    for bucket in first[2].buckets:
        check_bucket(bucket, bucket_bytes, is_tied)
    for sent in (first[2], second[2]):
        check_share(sent, setting, elements=sum(tensor.numel() for tensor in before.values()))


def send_experts(place: Place, model: Path, out: Path) -> tuple[int, dict[str, torch.Tensor]]:
    """How many buckets have some of a layer's experts, and all that is sent, as files have it."""
    worker = Worker(place)
    worker.load_model("actor", Setting(ZeroConfig(stage=3)).role(model))
    plan = open_way(worker, 3000, as_published=True)
    sent: dict[str, torch.Tensor] = {}
    for planned in plan.buckets:
        bucket = worker.weight_bucket("actor", planned, True)
        if bucket is not None:  # whose memory is that of the next bucket but one
            sent |= {name: tensor.clone() for name, tensor in tensors_in(bucket).items()}
    worker.save_model("actor", out)
    return sum(planned.experts is not None for planned in plan.buckets), sent


def test_experts_go_in_buckets_of_some(tmp_path: Path, two_ranks: RankProcesses) -> None:
    """ZeRO-3 gathers a layer's experts once, and sends as many at a time as a bucket holds."""
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        **{"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2},
        **{"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "num_experts": 8},
        **{"num_experts_per_tok": 2, "moe_intermediate_size": 16},
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "model")
    make_tokenizer().save_pretrained(tmp_path / "model")
    (cut, sent), (_, nothing) = two_ranks.run(send_experts, tmp_path / "model", tmp_path / "saved")
    saved = load_file(tmp_path / "saved" / "model.safetensors")
    assert cut > 4 and nothing == {}
    assert all(torch.equal(sent[name], tensor) for name, tensor in saved.items())


def check_share(sent: Sent, setting: Setting, elements: int) -> None:
    """Half of what is divided, but for padding."""
    [share] = sent.shares
    at_stage_3 = setting.zero.stage == 3
    whole = elements * (2 if setting.dtype == "bfloat16" else 4)
    expected = DividedShare(
        "actor", "weights" if at_stage_3 else "fp32 masters", whole, 2, share.held
    )
    assert share == expected
    assert whole / 2 <= share.held < 1.01 * whole / 2


def tensors_of(sent: Sent) -> dict[str, torch.Tensor]:
    """All tensors; none may be in two buckets."""
    found: dict[str, torch.Tensor] = {}
    for bucket in sent.buckets:
        assert bucket is not None
        tensors = tensors_in(bucket)
        assert not tensors.keys() & found.keys()
        found |= tensors
    return found


def check_values(sent: Sent, want: dict[str, torch.Tensor], is_tied: bool) -> None:
    """The model's tensors, each once, and the tied head under its own name as well."""
    got = tensors_of(sent)
    expected = dict(want)
    if is_tied:
        expected["lm_head.weight"] = want["model.embed_tokens.weight"]
    assert got.keys() == expected.keys() == set(sent.plan.names)
    assert len(sent.plan.names) == len(set(sent.plan.names))
    assert sent.plan.largest == max(b.bytes for b in sent.buckets if b is not None)
    for name, tensor in got.items():
        assert torch.equal(tensor, expected[name].to(tensor.dtype)), name


def check_bucket(bucket: WeightBucket | None, limit: int, is_tied: bool) -> None:
    """Its size (a tensor over the limit is alone), and the hashes of what it holds."""
    assert bucket is not None
    own = [t for t in bucket.tensors if not (is_tied and t.name == "lm_head.weight")]
    assert len(own) == 1 or sum(t.bytes for t in own) <= limit
    tensors = tensors_in(bucket)
    for sent in bucket.tensors:
        content = tensors[sent.name].contiguous().view(torch.uint8).numpy().tobytes()
        whole = content + bytes(-len(content) % 8)
        assert (len(content), xxhash.xxh3_64_intdigest(whole)) == (sent.bytes, sent.checksum)
    assert bucket.bytes < sum(t.bytes for t in bucket.tensors) + 8 * len(bucket.tensors)


@dataclass(frozen=True)
class Allocation:
    """Bytes of parameters that are whole on a rank.

    apart: outside of `gathered`. gathered: inside, for each bucket. own: those of each bucket's
    parameters that are over the persistence threshold. persistent: of all that are under it.
    """

    apart: int
    gathered: tuple[int, ...]
    own: tuple[int, ...]
    persistent: int
    model: int


def whole_bytes(module: torch.nn.Module) -> int:
    """Return the bytes of whole tensors; those that ZeRO-3 has divided have no elements here."""
    return sum(p.nbytes for p in module.parameters())


def score(engine: Engine, place: Place) -> None:
    with engine.scoring():
        engine.forward(PackTensors.from_pack(own_packs(place, BATCHES[0], 31)[0], CPU), False)


def learn(engine: ZeroEngine, place: Place) -> None:
    pack = PackTensors.from_pack(own_packs(place, BATCHES[0], 31)[0], CPU)
    engine.backward(-engine.forward(pack, False)[0].mean())
    engine.step(1e-3)


def hold_while_gathering(place: Place, model: Path, frozen: bool) -> Allocation:
    """After the engine has scored and, if it can, learned: persistent parameters are there."""
    join(place)
    role = Setting(ZeroConfig(stage=3)).role(model)
    module = load_policy(role.model, CPU)
    elements = {name: p.numel() for name, p in module.named_parameters()}
    sizes = {name: p.nbytes for name, p in module.named_parameters()}
    engine: FrozenZeroEngine | ZeroEngine
    if frozen:
        engine = FrozenZeroEngine(
            module, FrozenRole(model=role.model).with_engine(FrozenZeroConfig(stage=3)), place
        )
    else:
        engine = ZeroEngine(module, role, place)
        learn(engine, place)
        score(engine, place)
        learn(engine, place)
    score(engine, place)
    apart, gathered, own = whole_bytes(module), [], []
    for names in plan_buckets(engine, BUCKET):
        with engine.gather(names) as tensors:
            assert all(tensors[name].numel() == elements[name] for name in names)
            gathered.append(whole_bytes(module))
        own.append(sum(sizes[name] for name in names if elements[name] > PERSISTENT))
    persistent = sum(sizes[name] for name, count in elements.items() if count <= PERSISTENT)
    return Allocation(apart, tuple(gathered), tuple(own), persistent, sum(sizes.values()))


@pytest.mark.parametrize("frozen", [False, True])
def test_only_one_bucket_is_whole_at_a_time(
    frozen: bool, tied: Path, two_ranks: RankProcesses
) -> None:
    for held in two_ranks.run(hold_while_gathering, tied, frozen):
        assert held.apart <= held.persistent < BUCKET < held.model / 4
        assert len(held.gathered) > 4 and max(held.own) <= BUCKET
        for others, own in zip(held.gathered, held.own, strict=True):
            assert own <= others <= own + held.persistent


@pytest.mark.parametrize("sinks", [False, True])
def test_a_layer_is_computed_anew_where_stage_3_gathers_anew(
    sinks: bool, tied: Path, tmp_path: Path, two_ranks: RankProcesses
) -> None:
    """DeepSpeed gathers within the layer, and its linear adds its bias to what is kept."""
    model = tied
    if sinks:
        model = tmp_path / "gpt"
        config = tiny_config("gpt_oss", True, vocab=VOCAB, window=4)
        config.initializer_range = 0.1  # else sinks have hardly a gradient
        write_tiny_model(model, config, seed=0, tokenizer=make_tokenizer())
    zero = ZeroConfig(stage=3, bucket_elements=150_000)
    setting = Setting(zero, checkpointing="selective")
    results = two_ranks.run(train_sft_gathering, model, setting, BATCHES, tmp_path / "saved")
    want = plain_run(plain_policy(model), sft_loss, BATCHES, 1.0)
    assert worst_error(results, want) < 1e-5
    assert distance(saved_weights(tmp_path / "saved"), want) < 5e-5
