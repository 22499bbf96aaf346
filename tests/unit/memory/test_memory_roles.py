"""From a role's config to what it holds on one rank."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from decided import decided_role
from some_roles import ACTOR, REFERENCE

from plimsoll.config.cluster import Device
from plimsoll.config.engine import AdapterConfig, FrozenRole, ModelConfig, TrainedRole
from plimsoll.config.rl import RlConfig
from plimsoll.jobs import JOBS
from plimsoll.machine.hardware import parse_cluster
from plimsoll.memory.plan import make_plan
from plimsoll.memory.weigh import Ground
from plimsoll.model.price.form import activation_form, adapter_tensors
from plimsoll.resolve.decisions import Capability
from plimsoll.resolve.roles import Role
from plimsoll.resolve.run_spec import resolve
from plimsoll.shapes.known_models import read_shape
from plimsoll.shapes.shape import MicroBatch
from plimsoll.sync.price import CHECKSUM_BYTES, Sending
from plimsoll.timeline.items import Allocation, Moment, job_moments
from plimsoll.trainer.price import RoleWork, frozen_role, trained_role

MODEL = "Qwen/Qwen2.5-7B"
PARAMETERS = 7_615_616_512
LAYERS, HIDDEN, KV, INNER = 28, 3584, 512, 18944
WORK = MicroBatch(tokens=4096, sequences=4, longest=1024, loss_tokens=2048)
MOMENTS = job_moments((ACTOR, REFERENCE), ("rollout", "score", "train_actor", "sync", "save"))


def reference(settings: FrozenRole) -> tuple[Allocation, ...]:
    role = replace(REFERENCE, settings=settings)
    return frozen_role(RoleWork(role, read_shape(MODEL), WORK, 8, "cuda", MOMENTS))


MODEL_ON_CARD = {"path": MODEL, "dtype": "bfloat16", "attention": "varlen", "kernels": "own"}


def actor(ranks: int = 8, device: Device = "cuda", **settings: Any) -> dict[str, Allocation]:
    model = {"gradient_checkpointing": True} | settings.pop("model", {})
    role = decided_role(TrainedRole.model_validate({"model": MODEL_ON_CARD | model, **settings}))
    learning = replace(ACTOR, settings=role)
    own = RoleWork(learning, read_shape(MODEL), WORK, ranks, device, MOMENTS)
    held = trained_role(own, sending=Sending("nccl", 2**28, 2**29, 2**28))
    return {one.item.name: one for one in held}


@pytest.mark.parametrize(("stage", "first", "copied"), [(2, True, 8), (0, True, 1), (0, False, 0)])
def test_a_checkpoint_in_the_background_is_copied_whole(
    stage: int, first: bool, copied: int
) -> None:
    """At stage 0 the first rank alone writes one. The copy is there while the ranks train on."""
    settings = {"zero": {"stage": stage}, "ema": {}}
    role = decided_role(TrainedRole.model_validate({"model": MODEL_ON_CARD, **settings}))
    shape = read_shape(MODEL)
    own = RoleWork(
        *(replace(ACTOR, settings=role), shape, WORK, 8, "cuda", MOMENTS),
        first=first,
        copies_states=True,
    )
    held = {one.item.name: one for one in trained_role(own)}
    assert ("checkpoint file" in held) == (not copied)
    if copied:
        copy = held["copy of a checkpoint"]
        assert copy.item.bytes == 16 * PARAMETERS // copied and copy.item.where == "host"
        assert copy.moments == {moment for moment in MOMENTS if moment.phase != "load"}


def test_masters_of_16_bits_are_copied_as_such() -> None:
    settings = {"zero": {"stage": 2, "state_dtype": "bfloat16"}}
    role = decided_role(TrainedRole.model_validate({"model": MODEL_ON_CARD, **settings}))
    own = RoleWork(
        *(replace(ACTOR, settings=role), read_shape(MODEL), WORK, 8, "cuda", MOMENTS),
        copies_states=True,
    )
    held = {one.item.name: one for one in trained_role(own)}
    masters = size(held, "bf16 masters")
    assert masters == 2 * PARAMETERS // 8
    assert size(held, "copy of a checkpoint") == masters + size(held, "moments")


def size(held: dict[str, Allocation], name: str) -> int:
    return held[name].item.bytes


def test_full_training_at_stage_3() -> None:
    held = actor(zero={"stage": 3})
    assert size(held, "weights") == 2 * PARAMETERS // 8
    assert size(held, "fp32 masters") == 4 * PARAMETERS // 8
    assert size(held, "moments") == 8 * PARAMETERS // 8
    assert size(held, "accumulated gradients") == 4 * PARAMETERS // 8
    assert size(held, "live parameters") == 2_000_000_000
    assert size(held, "reduce bucket") == 2 * 50_000_000
    assert size(held, "checkpoint file") == 2 * 2**28


def test_eight_bit_moments() -> None:
    held = actor(zero={"stage": 2}, optimizer={"kind": "adamw_8bit"})
    assert size(held, "moments") / PARAMETERS * 8 == pytest.approx(2.03, abs=0.01)


@pytest.mark.parametrize(
    ("zero", "ranks", "where"),
    [
        ({"stage": 0}, 1, "device"),
        ({"stage": 2}, 8, "device"),
        ({"stage": 3, "optimizer_offload": "cpu"}, 8, "host"),
    ],
)
def test_a_moving_average_is_where_the_masters_are(
    zero: dict[str, object], ranks: int, where: str
) -> None:
    held = actor(zero=zero, ema={})
    assert size(held, "moving average of masters") == 4 * -(-PARAMETERS // ranks)
    assert held["moving average of masters"].item.where == where
    assert "moving average of masters" not in actor(zero=zero)


def test_states_in_bfloat16() -> None:
    """12 bytes a parameter of fp32 states become 6; only AdamW's own moments can be narrow."""
    held = actor(zero={"stage": 3, "state_dtype": "bfloat16"})
    assert size(held, "bf16 masters") == 2 * PARAMETERS // 8
    assert size(held, "moments") == 4 * PARAMETERS // 8
    eight = {"kind": "adamw_8bit"}
    both = actor(zero={"stage": 2, "state_dtype": "bfloat16"}, optimizer=eight)
    assert size(both, "moments") / PARAMETERS * 8 == pytest.approx(2.03, abs=0.01)


def test_a_second_copy_of_the_weights_for_slow_links() -> None:
    zero = {"stage": 3, "hpz_partition_size": 4}
    assert size(actor(ranks=16, zero=zero), "second copy of weights") == 2 * PARAMETERS // 4
    assert "second copy of weights" not in actor(ranks=16, zero={"stage": 3})
    held = actor(ranks=16, zero=zero, adapter={"rank": 16}, model={"quantization": "nf4"})
    first = sum(size(held, name) for name in ("weights", "frozen weights", "4-bit weights"))
    assert size(held, "second copy of weights") == pytest.approx(16 / 4 * first, rel=1e-6)


def test_layer_inputs_go_to_pinned_host_memory() -> None:
    kept = actor()
    moved = actor(model={"activation_offload": "cpu"})
    stream = 2 * WORK.tokens * HIDDEN
    assert size(kept, "layer inputs") == LAYERS * stream
    assert moved["layer inputs"].item.where == "host"  # the last of that name
    assert size(moved, "layer inputs") == LAYERS * 2**25  # 29,360,128 bytes, pinned
    assert "layer inputs" in actor(device="cpu", model={"activation_offload": "cpu"})


def test_an_offloaded_optimizer_is_in_host_memory() -> None:
    held = actor(zero={"stage": 3, "optimizer_offload": "cpu", "parameter_offload": "cpu"})
    for name in ("weights", "fp32 masters", "moments", "accumulated gradients"):
        assert held[name].item.where == "host"
    assert size(held, "accumulated gradients") == 2**32  # 3,807,808,256 bytes, pinned
    assert held["live parameters"].item.where == "device"


def test_an_adapter_on_all_linears() -> None:
    held = actor(zero={"stage": 2}, adapter={"rank": 16})
    sides = 2 * (HIDDEN + HIDDEN) + 2 * (HIDDEN + KV) + 3 * (HIDDEN + INNER)
    trained = 16 * LAYERS * sides
    assert size(held, "weights") == 2 * trained
    assert size(held, "frozen weights") == 2 * PARAMETERS
    assert size(held, "moments") == trained  # 8 bytes over 8 ranks
    assert (
        size(held, "buckets of weights") == 2**29 + CHECKSUM_BYTES
    )  # it is merged into what is sent
    assert size(held, "model to save") == 2 * trained
    assert size(held, "checkpoint file") == 12 * trained // 8
    averaged = actor(zero={"stage": 2}, adapter={"rank": 16}, ema={})
    assert size(averaged, "checkpoint file") == 16 * trained // 8


def test_dropout_and_four_bits_of_an_adapter_are_computed_with() -> None:
    """Dropout keeps a mask of one byte in each layer but the last, which is at its top, and its
    output in place of its input; of the weights in 4 bits one at a time is written out."""

    def held(dropout: float = 0.0, quantization: str = "none") -> dict[str, Allocation]:
        adapter = {"rank": 16, "targets": ("down_proj",), "dropout": dropout}
        model = {"gradient_checkpointing": False, "quantization": quantization}
        return actor(zero={"stage": 2}, adapter=adapter, model=model)

    plain, thinned, coded = held(), held(dropout=0.1), held(quantization="nf4")
    masks = size(thinned, "activations") - size(plain, "activations")
    assert masks == (LAYERS - 1) * WORK.tokens * INNER
    assert size(coded, "working set") - size(plain, "working set") == 2 * HIDDEN * INNER


def test_an_adapter_on_some_linears_with_magnitudes() -> None:
    config = AdapterConfig(rank=4, targets=("q_proj",), dora=True)
    tensors = Counter(adapter_tensors(read_shape(MODEL), config))
    assert tensors == Counter({(LAYERS, 4 * HIDDEN): 2, (LAYERS, HIDDEN): 1})


def test_an_adapter_on_experts() -> None:
    """Qwen3-30B: A and B of 128 experts in 48 layers, beside gate with up, and beside down."""
    shape = read_shape("Qwen/Qwen3-30B-A3B")
    tensors = Counter(adapter_tensors(shape, AdapterConfig(rank=16, targets=("experts",))))
    sides = (2048, 2 * 768, 768, 2048)
    assert tensors == Counter((48, 128 * 16 * side) for side in sides)
    assert sum(count * size for count, size in tensors.elements()) == 629_145_600
    linears = adapter_tensors(shape, AdapterConfig(rank=16))
    both = adapter_tensors(shape, AdapterConfig(rank=16, targets=("all-linear", "experts")))
    assert Counter(both) == Counter(linears) + tensors


def test_an_adapter_on_the_embedding() -> None:
    shape = read_shape("Qwen/Qwen2.5-7B")
    config = AdapterConfig(rank=4, targets=("embed_tokens",), dora=True)
    # PEFT's lora_embedding_A, lora_embedding_B and lora_magnitude_vector
    sizes = {4 * shape.vocabulary, 4 * shape.hidden, shape.hidden}
    assert Counter(adapter_tensors(shape, config)) == Counter({(1, size): 1 for size in sizes})


def test_four_bits_spare_embedding_head_and_norms() -> None:
    held = actor(zero={"stage": 2}, adapter={"rank": 16}, model={"quantization": "nf4"})
    linear = LAYERS * (2 * HIDDEN * HIDDEN + 2 * HIDDEN * KV + 3 * HIDDEN * INNER)
    assert size(held, "4-bit weights") == linear // 2
    assert size(held, "frozen weights") == 2 * (PARAMETERS - linear)


def test_one_weight_at_a_time_is_copied_while_loading() -> None:
    held = actor(zero={"stage": 3})["copy while loading"]
    assert held.item.bytes == 2 * read_shape(MODEL).embedding_parameters
    assert held.item.where == "host"
    assert held.moments == {Moment("load", "read actor")}


def test_the_reference_stays_or_visits() -> None:
    sizes: dict[str, Counter[str]] = {}
    for offload in ("none", "cpu"):
        role = FrozenRole.model_validate({"model": MODEL_ON_CARD, "zero": {"offload": offload}})
        held = reference(role)
        step = Moment("train_actor", "step")
        sizes[offload] = Counter()
        for one in held:
            if step in one.moments:
                sizes[offload][one.item.where] += one.item.bytes
    assert sizes["none"] == {"device": 2 * PARAMETERS}
    assert sizes["cpu"]["device"] == 0
    # Each tensor is pinned by itself: the embedding's 1,089,994,752 bytes take 2 GiB.
    assert 2 * PARAMETERS < sizes["cpu"]["host"] < 4 * PARAMETERS


def test_a_divided_reference_is_gathered_while_it_scores() -> None:
    role = FrozenRole.model_validate({"model": MODEL_ON_CARD, "zero": {"stage": 3}})
    held = {one.item.name: one for one in reference(role)}
    assert size(held, "frozen weights") == 2 * PARAMETERS // 8
    assert held["live parameters"].moments == {Moment("score", "forward")}


@pytest.mark.parametrize(
    ("dtype", "capability", "written"),
    [
        ("bfloat16", (7, 5), True),
        ("bfloat16", (8, 0), False),
        ("bfloat16", None, False),
        ("float32", (7, 0), False),
    ],
)
def test_no_kernel_takes_bfloat16_before_ampere(
    dtype: str, capability: Capability | None, written: bool
) -> None:
    model = ModelConfig.model_validate(MODEL_ON_CARD | {"dtype": dtype, "attention": "sdpa"})
    shape = read_shape(MODEL)
    devices: dict[Device, bool] = {"cuda": written, "cpu": False}
    for device, found in devices.items():
        form = activation_form(model, None, shape, "policy", device, False, False, capability)
        assert form.writes_scores is found


def test_a_role_of_another_name_is_planned_as_it_says() -> None:
    """No code knows the name: the ranks, the phases and the items follow from the role's fields."""
    ppo = JOBS["ppo"]

    def roles(config: RlConfig) -> list[Role]:
        return [replace(r, name="safety") if r.part else r for r in ppo.roles(config)]

    small = {"model": {"path": "Qwen/Qwen2.5-0.5B"}}
    values: dict[str, object] = {
        "run": {"directory": "runs/x", "steps": 5},
        "data": {"train": {"path": "x.jsonl", "prompt": "p"}},
        "batch": {"prompts": 8, "micro_batch_tokens": 4096},
        "actor": small,
        "critic": small,
        "reward_model": {"role": small},
        "cluster": {"ranks": 2, "reward_ranks": 1, "hardware": "4xA100-80GB"},
    }
    spec = resolve(replace(ppo, roles=roles), RlConfig.model_validate(values))
    assert [*spec.roles] == ["actor", "critic", "reference", "safety"]
    assert spec.scorer_of("reward_model").name == "safety"
    found = make_plan(spec, Ground(parse_cluster("4xA100-80GB", 1, 10**12)))
    held = [{one.item.role for one in store.held} for store in found.devices]
    [alone] = [owners for owners in held if "safety" in owners]
    assert alone == {"safety", "process"}
    assert {"actor", "critic", "reference", "process"} in held
