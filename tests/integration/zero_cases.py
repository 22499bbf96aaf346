"""The settings of ZeRO that its engine is tested with, and what one engine does in each."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Literal
from unittest.mock import patch

import torch
import xxhash
from buckets import open_way
from decided import decided_model
from engine_cases import DECAY, RATES, Batch, Setting, zero_stage
from engine_jobs import JOBS
from torch import Tensor, UntypedStorage

from plimsoll.config.cluster import RankSleep
from plimsoll.config.engine import AdapterConfig, EmaConfig, FrozenRole
from plimsoll.jobs.roles import actor
from plimsoll.model.price.form import trained_parameters
from plimsoll.shapes.known_models import read_shape
from plimsoll.shapes.shape import MicroBatch
from plimsoll.sync.buckets import hash_bytes
from plimsoll.timeline.items import Life
from plimsoll.trainer.price import RoleWork, trainer_price
from plimsoll.trainer.process_group import Place
from plimsoll.trainer.worker import UpdateResult, Worker
from plimsoll.trainer.zero.config import FrozenZeroConfig
from plimsoll.trainer.zero.engine import ZeroEngine
from traced_bytes import LiveBytes

Offload = Literal["none", "optimizer", "weights", "both"]
Numbers = Literal[
    "float32", "bf16", "bf16 gradients", "bf16 states", "bf16 gradients, states", "8-bit moments"
]
Split = Literal["many", "one", "sparse"]
Recompute = Literal["nothing", "layers", "parts"]

_LORA = AdapterConfig(rank=4, alpha=8.0)
FORMS: Mapping[str, AdapterConfig | None] = {
    "full": None,
    "lora": _LORA,
    "lora nf4": _LORA,
    "rslora nf4": AdapterConfig(rank=4, alpha=8.0, rslora=True, targets=("q_proj", "down_proj")),
    "dora": AdapterConfig(rank=4, alpha=8.0, dora=True),
    "dora nf4": AdapterConfig(rank=4, alpha=8.0, dora=True),
    "embedding": AdapterConfig(rank=4, alpha=8.0, targets=("embed_tokens", "v_proj")),
    "whole": AdapterConfig(
        rank=4, alpha=8.0, targets=("v_proj",), modules_to_save=("embed_tokens", "lm_head")
    ),
    "experts": AdapterConfig(rank=8, alpha=16.0, targets=("all-linear", "experts")),
}
"""What is trained: all weights, or an adapter; its base is in 4 bits where that is in the name."""
BUDGETS: Mapping[Split, int] = {"many": 39, "one": 100_000, "sparse": 39}
"""Tokens of a micro-batch; 39 just hold the longest pair."""
BYTES = 0.02
"""The largest error of the plan's bytes, as a share of them."""
_PATIENCE = 5.0
RECOMPUTED: Mapping[Recompute, bool | Literal["selective"]] = {
    "nothing": False,
    "layers": True,
    "parts": "selective",
}


@dataclass(frozen=True)
class Case:
    """One way to train a role.

    Attributes:
        job: What is learned; see JOBS.
        form: What is trained; see FORMS.
        offload: What waits in host memory.
        base: The model, whose head is its embedding (tied) or its own; or a mixture of experts.
        split: A rank's micro-batches: several, a single one, or on some rank none that is learned
            from. In a single one, pairs do not share their prompts.
        recompute: What the backward pass computes anew.
        averages: Whether a moving average is kept.
        numbers: What weights, gradients and states are kept in, where it is not float32; without
            gradients or states, those are in float32.
        bucket: Elements of a bucket.
        clips: Whether the gradient is longer than it may be.
        copies: Ranks that keep a second copy of the weights together (hpZ).
        resumes: Whether the last step is taken again from a checkpoint.
        sleeps: What moves to host memory and back after each of the first steps.
    """

    job: str
    form: str
    stage: int
    offload: Offload = "none"
    ranks: int = 1
    base: Literal["tied", "untied", "mixture"] = "tied"
    split: Split = "many"
    recompute: Recompute = "nothing"
    averages: bool = False
    numbers: Numbers = "float32"
    bucket: int = 1_000
    clips: bool = True
    copies: int = 1
    resumes: bool = True
    sleeps: RankSleep = "none"

    def __str__(self) -> str:
        """Name the values that are not the usual ones."""
        given = [getattr(self, field.name) for field in fields(self)[:3]]
        given += [
            f"{field.name}={value}"
            for field in fields(self)[3:]
            if (value := getattr(self, field.name)) != field.default
        ]
        return " ".join(map(str, given))

    @property
    def batches(self) -> tuple[Batch, ...]:
        """What each step learns from."""
        job = JOBS[self.job]
        return job.sparse if self.split == "sparse" else job.batches

    @property
    def offloads(self) -> bool:
        """Whether anything waits in host memory."""
        return self.offload != "none"

    @property
    def is_priced_high(self) -> bool:
        """Whether the plan counts what is not always there.

        A second copy of the weights comes and goes with each step; and on a CPU, one rank uses
        offloaded weights where they lie.
        """
        return self.copies > 1 or (self.ranks == 1 and self.offload in ("weights", "both"))

    @property
    def weighs(self) -> bool:
        """Whether nothing beside the engine grows, so that its bytes can be told.

        A teacher's hidden states do, and what is kept whole of a reference that is divided.
        """
        other = JOBS[self.job].other
        return other == "none" or (other == "reference" and (self.stage < 3 or self.ranks == 1))

    @property
    def setting(self) -> Setting:
        """The case in the words of the config."""
        numbers = self.numbers
        zero = zero_stage(
            self.stage,
            optimizer_offload="cpu" if self.offload in ("optimizer", "both") else "none",
            parameter_offload="cpu" if self.offload in ("weights", "both") else "none",
            gradient_dtype="bfloat16" if "gradients" in numbers else "auto",
            state_dtype="bfloat16" if "states" in numbers else "float32",
            hpz_partition_size=self.copies,
            bucket_elements=self.bucket,
        )
        return Setting(
            zero,
            dtype="bfloat16" if numbers.startswith("bf16") else "float32",
            max_grad_norm=1.0 if self.clips else 1e4,
            micro_batch_tokens=BUDGETS[self.split],
            checkpointing=RECOMPUTED[self.recompute],
            adapter=FORMS[self.form],
            quantization="nf4" if self.form.endswith("nf4") else "none",
            optimizer="adamw_8bit" if numbers == "8-bit moments" else "adamw",
            ema=EmaConfig(decay=DECAY) if self.averages else None,
        )


EXACT = (
    Case("sft", "full", 3, "none", 2, "untied", "sparse", "nothing", True),
    Case("sft", "lora", 0, "none", 2, "tied", "one", "nothing", True, sleeps="all"),
    Case("sft", "lora", 2, "none", 1, "untied", "one", "parts", False),
    Case("sft", "lora nf4", 2, "optimizer", 2, "tied", "many", "layers", True, sleeps="states"),
    Case("policy", "full", 3, "both", 2, "untied", "sparse", "parts", False, sleeps="all"),
    Case("policy", "lora", 0, "none", 1, "tied", "one", "layers", True, sleeps="states"),
    Case("policy", "lora nf4", 2, "optimizer", 1, "untied", "many", "nothing", False),
    Case("value", "full", 2, "optimizer", 2, "untied", "one", "parts", True, sleeps="states"),
    Case("value", "lora", 3, "both", 1, "tied", "many", "nothing", True),
    Case("value", "lora nf4", 0, "none", 2, "untied", "sparse", "layers", False, sleeps="all"),
    Case("dpo", "full", 2, "none", 2, "untied", "sparse", "nothing", False, sleeps="all"),
    Case("dpo", "lora", 0, "none", 1, "untied", "one", "layers", False, sleeps="states"),
    Case("dpo", "lora nf4", 3, "both", 1, "tied", "many", "parts", True),
    Case("kto", "full", 0, "none", 2, "tied", "one", "parts", False),
    Case("kto", "lora", 2, "optimizer", 2, "untied", "sparse", "nothing", True, sleeps="states"),
    Case("kto", "lora nf4", 3, "none", 1, "untied", "many", "layers", False, sleeps="all"),
    Case("rm", "full", 3, "both", 2, "untied", "sparse", "nothing", True),
    Case("rm", "lora", 0, "none", 1, "tied", "many", "parts", False, sleeps="all"),
    Case("rm", "lora nf4", 2, "optimizer", 2, "untied", "one", "layers", True, sleeps="states"),
    Case("prm", "full", 3, "none", 1, "tied", "one", "nothing", False, sleeps="states"),
    Case("prm", "lora", 2, "optimizer", 2, "tied", "sparse", "parts", True),
    Case("prm", "lora nf4", 0, "none", 2, "untied", "many", "layers", True, sleeps="all"),
    Case("distill", "full", 0, "none", 2, "untied", "many", "nothing", True),
    Case("distill", "full", 2, "optimizer", 2, "tied", "sparse", "layers", False),
    Case("distill", "lora", 3, "both", 2, "tied", "one", "layers", True, sleeps="all"),
    Case("distill", "lora nf4", 2, "none", 1, "tied", "one", "parts", False, sleeps="states"),
)
"""In float32, where the bounds are narrow: every two values of every two of the first nine axes."""

ROUNDED = (
    Case("sft", "full", 0, ranks=2, numbers="8-bit moments", sleeps="states"),
    Case("sft", "lora", 0, numbers="bf16", sleeps="all"),
    Case("sft", "lora nf4", 0, numbers="bf16", averages=True),
    Case("sft", "full", 1, numbers="8-bit moments", sleeps="states"),
    Case("sft", "full", 1, ranks=2, numbers="bf16", averages=True, sleeps="states"),
    Case("sft", "full", 1, "optimizer", numbers="bf16"),
    Case("sft", "lora", 1, numbers="bf16 gradients", averages=True, sleeps="all"),
    Case("sft", "lora", 1, "optimizer", 2, numbers="bf16 states"),
    Case("sft", "lora nf4", 1, "optimizer", 2, numbers="bf16 gradients, states", sleeps="states"),
    Case("sft", "full", 2, numbers="8-bit moments", averages=True),
    Case("sft", "full", 2, ranks=2, numbers="bf16 states", sleeps="states"),
    Case("sft", "lora", 2, numbers="bf16 gradients, states", sleeps="all"),
    Case("sft", "lora", 2, "optimizer", numbers="bf16", sleeps="states"),
    Case("sft", "lora nf4", 2, "optimizer", 2, numbers="bf16 gradients", averages=True),
    Case("sft", "full", 3, ranks=2, numbers="8-bit moments", averages=True, sleeps="all"),
    Case("sft", "full", 3, "both", numbers="bf16 gradients", sleeps="states"),
    Case("sft", "full", 3, "both", numbers="bf16 gradients, states"),
    Case("sft", "lora", 3, "both", 2, numbers="bf16", averages=True, sleeps="all"),
    Case("sft", "lora nf4", 3, numbers="bf16 states", sleeps="all"),
)
"""In numbers that are rounded: every two values of numbers, stage, form, offload and ranks."""

ALONE = (
    Case("sft", "full", 0, clips=False),
    Case("sft", "full", 1, "optimizer"),
    Case("simpo", "full", 1, ranks=2, bucket=150_000),
    Case("sft", "full", 2, ranks=2, clips=False, split="one"),
    Case("sft", "full", 3, "weights", 2, bucket=150_000),
    Case("sft", "full", 3, "optimizer", clips=False),
    Case("sft", "full", 3, ranks=2, copies=2, bucket=150_000, resumes=False, sleeps="all"),
    Case("sft", "rslora nf4", 2, ranks=2),
    Case("sft", "dora", 3, ranks=2),
    Case("sft", "dora nf4", 2),
    Case("sft", "embedding", 3, ranks=2, base="untied"),
    Case("sft", "whole", 2, ranks=2, base="untied"),
    Case("sft", "experts", 3, "both", 2, "mixture", recompute="parts", averages=True, sleeps="all"),
    Case("value", "experts", 0, base="mixture", recompute="layers"),
    Case("policy", "experts", 2, ranks=2, base="mixture", split="sparse"),
)
"""Values that no pair needs."""

CASES = EXACT + ROUNDED + ALONE


@dataclass(frozen=True)
class Weight:
    """Bytes on one rank, as they were found or as the plan has them.

    Attributes:
        between: Between two steps.
        before: Just before an update.
        peak: At the highest point of the update.
    """

    between: int
    before: int
    peak: int


@dataclass(frozen=True)
class Seen:
    """What one rank saw.

    Attributes:
        again: The last step, taken again from a checkpoint by another engine.
        is_same: Whether that engine's masters and averages became the first one's, and whether what
            is frozen stayed as it was, bit for bit.
        stayed: Bytes that stayed where they were while the rank slept.
    """

    steps: list[UpdateResult]
    held: Weight
    priced: Weight
    again: UpdateResult | None
    is_same: bool
    stayed: int


def train_and_weigh(place: Place, case: Case, model: Path, other: Path, out: Path) -> Seen:
    """Take three steps and weigh the last; save the adapter or model before and after them."""
    job, role, worker = JOBS[case.job], case.setting.role(model), Worker(place)
    frozen = FrozenRole(model=decided_model(str(other), dtype=case.setting.dtype))
    divided = FrozenZeroConfig(stage=3 if case.stage == 3 else 0)
    job.load_other(worker, frozen.with_engine(divided))
    before = live_storages()
    job.load(worker, role)
    base = _frozen_hash(worker)
    if role.adapter is not None:
        worker.save_model("actor", out / "first")
    steps = [_step(worker, place, case, 0)]
    _sleep(worker, case, before)
    worker.wake()
    steps.append(_step(worker, place, case, 1))
    priced = price(case, model)
    between = bytes_since(before, priced.between)
    stayed = _sleep(worker, case, before)
    worker.save_checkpoint("actor", out / "checkpoint")
    worker.wake()
    with _weighing(worker, before, priced) as found:
        steps.append(_step(worker, place, case, 2))
    held = Weight(between, *found)
    worker.save_model("actor", out / "last")
    straight = _states(worker, case, out / "average")
    if role.adapter is not None and job.head == "policy":  # merged into what engines are sent
        for planned in open_way(worker, 100_000).buckets:
            worker.weight_bucket("actor", planned, False)
    again, is_same = None, _frozen_hash(worker) == base
    if case.resumes:
        job.load(worker, role)
        worker.load_checkpoint("actor", out / "checkpoint")
        again = _step(worker, place, case, 2)
        resumed = _states(worker, case, out / "resumed")
        is_same = is_same and all(map(torch.equal, straight, resumed))
    return Seen(steps, held, priced, again, is_same, stayed)


def _sleep(worker: Worker, case: Case, before: dict[int, UntypedStorage]) -> int:
    """Put the rank to sleep, if it sleeps; return the bytes that stay where they were.

    Those of weights that are mapped from files do not count.
    """
    awake = {key: storage for key, storage in live_storages().items() if key not in before}
    if case.sleeps == "none":
        return 0
    worker.sleep(case.sleeps)
    held = live_storages().keys() & awake.keys()
    return sum(awake[key].nbytes() for key in held if awake[key].resizable())


@contextmanager
def _weighing(
    worker: Worker, before: dict[int, UntypedStorage], priced: Weight
) -> Iterator[list[int]]:
    """Weigh the update inside the block: just before it, and at its highest point."""
    engine, found = worker._engines["actor"], list[int]()
    assert isinstance(engine, ZeroEngine)
    take = engine.step

    def step(rate: float) -> float:
        found.append(bytes_since(before, priced.before))
        with LiveBytes() as live:
            for tensor in _live_tensors():
                live.count(tensor)
            others = live.now - found[0]
            live.enter("update")
            norm = take(rate)
        found.append(live.peaks["update"] - others)
        return norm

    with patch.object(engine, "step", step):
        yield found


def _step(worker: Worker, place: Place, case: Case, number: int) -> UpdateResult:
    job, batch = JOBS[case.job], case.batches[number]
    lesson = job.teach(worker, place, batch, BUDGETS[case.split], case.split != "one")
    return worker.train(
        "actor", lesson.packs, lesson.columns, batch.counts, lesson.objective, RATES[number]
    )


def _frozen_hash(worker: Worker) -> str:
    """Hash all that is frozen, as it is stored: codes of 4 bits, and their scales, included."""
    engine, digest = worker._engines["actor"], xxhash.xxh3_64()
    frozen = {name: p for name, p in engine.module.named_parameters() if not p.requires_grad}
    if not frozen:
        return ""
    with engine.gather([*frozen]) as tensors:
        for name, parameter in frozen.items():
            digest.update(hash_bytes(tensors[name].contiguous().cpu()).encode())
            scales = getattr(parameter, "quant_state", None)
            if scales is not None:
                digest.update(hash_bytes(scales.absmax).encode())
    return digest.hexdigest()


def _states(worker: Worker, case: Case, out: Path) -> list[Tensor]:
    """Return copies of the masters and of their averages; save the model of the averages."""
    engine = worker._engines["actor"]
    assert isinstance(engine, ZeroEngine)
    states = [master.detach().clone() for master in engine.masters()]
    if case.averages:
        worker.swap_average("actor")
        worker.save_model("actor", out)
        states += [master.detach().clone() for master in engine.masters()]
    return states


def _live_tensors() -> list[Tensor]:
    """Return all live tensors and gradients."""
    gc.collect()
    tensors = [o for o in gc.get_objects() if issubclass(type(o), Tensor)]
    gradients = [t.grad for t in tensors if t.is_leaf and t.grad is not None]
    return [t for t in [*tensors, *gradients] if t.device.type == "cpu"]


def live_storages() -> dict[int, UntypedStorage]:
    """Return the memory of all live tensors and gradients, by the address of the storage itself.

    It stays the same while the memory moves. Keep the result alive: an address could else be given
    to others.
    """
    storages = (tensor.untyped_storage() for tensor in _live_tensors())
    return {storage._cdata: storage for storage in storages}


def bytes_since(before: dict[int, UntypedStorage], expected: int) -> int:
    """Return the bytes of what lives and did not live before.

    If they are more than what is expected, look again for some seconds: gloo's threads let go of
    what they have sent a moment after the send is done.
    """
    give_up = time.monotonic() + _PATIENCE
    while True:
        found = sum(one.nbytes() for key, one in live_storages().items() if key not in before)
        if found <= (1 + BYTES) * expected or time.monotonic() > give_up:
            return found
        time.sleep(0.01)


def price(case: Case, model: Path) -> Weight:
    """Return the plan's price of the role on one rank."""
    role = actor(case.setting.role(model), JOBS[case.job].head)
    largest, shape = MicroBatch(39, 2, 30, 20), read_shape(str(model))
    work = RoleWork(role, shape, largest, case.ranks, "cpu", moments=frozenset())
    tensors = trainer_price(role.settings).trained(case.setting.role(model), work, None).tensors

    def total(*lives: Life) -> int:
        return sum(one.bytes for one in tensors if one.life in lives)

    between = total("always", "built", "stepped")
    before = between + total("training")
    return Weight(between, before, before + max(total("norming"), total("stepping")))


def price_of_weights(case: Case, model: Path) -> int:
    """Return the plan's price of the role's weights on one rank, between two steps."""
    role = actor(case.setting.role(model), JOBS[case.job].head)
    largest, shape = MicroBatch(39, 2, 30, 20), read_shape(str(model))
    work = RoleWork(role, shape, largest, case.ranks, "cpu", moments=frozenset())
    tensors = trainer_price(role.settings).trained(case.setting.role(model), work, None).tensors
    return sum(one.bytes for one in tensors if one.kind == "weights" and one.life == "always")


def price_checkpoint(case: Case, model: Path) -> int:
    """Return the plan's price of the files of a checkpoint, of all ranks together."""
    role, head = case.setting.role(model), JOBS[case.job].head
    saved = trainer_price(role).saved(role)
    trained = trained_parameters(role, read_shape(str(model)), head)
    return trained * (saved.masters + saved.moments + saved.average)
