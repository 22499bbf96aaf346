"""The DeepSpeed settings of a role, built from its config, and the figures that prices need.

The figures are sizes in the settings and counts of parameters. All are torch-free: the plan prices
the same settings that will run.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import ceil
from typing import Any

from plimsoll.config.cluster import Device
from plimsoll.config.engine import FrozenRole, ModelConfig, TrainedRole
from plimsoll.model.price.form import (
    adapter_tensors,
    frozen_parameters,
    trained_parameters,
    whole_tensors,
)
from plimsoll.resolve.roles import HeadKind
from plimsoll.shapes.shape import ModelShape, parameter_tensors, small_parameters
from plimsoll.trainer.zero.config import FrozenZeroConfig, ZeroConfig

_SHORT = {"bfloat16": "bf16", "float32": "fp32"}
_NF4 = 4 / 64  # bytes of fp32 scales a parameter, in blocks of 64
_NF4_DOUBLE = 1 / 64 + 4 / (64 * 256)  # 8-bit scales; an fp32 scale for each 256 of these
_MOMENTS = {"adamw": 8.0, "adamw_8bit": 2 * (1 + 4 / 256)}  # both; 8 bits: fp32 scales of 256


def deepspeed_settings(role: TrainedRole, device: Device, ranks: int) -> dict[str, object]:
    """Return DeepSpeed's config for a trained role.

    `managed_gradient_accumulation: false` lets `step()` be the boundary, so that a step may hold
    any number of micro-batches. The learning rate is set before every step by the engine, and
    losses are divided by global counts before they come here, hence no scaling of any kind.
    """
    zero = role.settings_of(ZeroConfig)
    narrow = zero.state_dtype == "bfloat16"
    return {
        **_common(ranks),
        "managed_gradient_accumulation": False,
        "gradient_clipping": role.optimizer.max_grad_norm,
        "bf16": {
            "enabled": role.model.dtype == "bfloat16",
            "bf16_master_weights_and_grads": narrow,
            "bf16_optimizer_states": narrow,
        },
        "zero_optimization": zero_settings(zero, device, ranks),
        "zero_allow_untested_optimizer": True,
        "data_types": {"grad_accum_dtype": _SHORT[zero.gradient_dtype]},
    }


def zero_settings(zero: ZeroConfig, device: Device, ranks: int) -> dict[str, object]:
    """Return the `zero_optimization` section, every size written out.

    At stage 3 cards gather weights and reduce gradients on streams of their own, beside the compute
    (`overlap_comm`, DeepSpeed's default there). Not at stage 2, where DeepSpeed would wait for the
    whole card before it reduces a bucket (stage_1_and_2.py, `reduce_ipg_grads`), and not at stages
    0 and 1, where it refuses that with `managed_gradient_accumulation: false`.
    """
    settings: dict[str, object] = {
        "stage": zero.stage,
        "overlap_comm": zero.stage == 3 and device == "cuda" and ranks > 1,
        "contiguous_gradients": True,
        "reduce_scatter": True,
        "reduce_bucket_size": zero.bucket_elements,
        "allgather_bucket_size": zero.bucket_elements,
    }
    pin = device == "cuda"
    if zero.optimizer_offload == "cpu":
        settings["offload_optimizer"] = {"device": "cpu", "pin_memory": pin}
    if zero.stage == 3:
        settings |= {
            "stage3_prefetch_bucket_size": zero.bucket_elements,
            "stage3_max_live_parameters": 1_000_000_000,
            "stage3_max_reuse_distance": 1_000_000_000,
            "stage3_param_persistence_threshold": 100_000,
            "sub_group_size": 1_000_000_000,
            "zero_quantized_weights": zero.quantized_weights,
            "zero_quantized_gradients": zero.quantized_gradients,
            "zero_hpz_partition_size": zero.hpz_partition_size,
        }
        if zero.parameter_offload == "cpu":
            settings["offload_param"] = {"device": "cpu", "pin_memory": pin}
    return settings


def frozen_settings(role: FrozenRole, device: Device, ranks: int) -> dict[str, object]:
    """Return DeepSpeed's config for a frozen role that is divided over the ranks (stage 3)."""
    zero = ZeroConfig(stage=3, parameter_offload=role.settings_of(FrozenZeroConfig).offload)
    return {
        **_common(ranks),
        "bf16": {"enabled": role.model.dtype == "bfloat16"},
        "zero_optimization": zero_settings(zero, device, ranks),
    }


def _common(ranks: int) -> dict[str, object]:
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "train_batch_size": ranks,
        "steps_per_print": 1_000_000_000,
        # This clock makes the host wait for the card before every forward pass (utils/timer.py).
        "timers": {"throughput": {"enabled": False}},
    }


@dataclass(frozen=True)
class ZeroSizes:
    """The settings of a role's engine that memory depends on; elements if not said otherwise.

    Attributes:
        accumulate: Bytes of an accumulated gradient.
        bucket: Elements of a bucket that is reduced.
        prefetch: Elements that stage 3 gathers ahead.
        live: Elements that stage 3 keeps gathered at once.
        persistence: The size up to which stage 3 does not divide a tensor.
        sub_group: Elements that stage 3 updates at once.
        offload: Whether the optimizer is in host memory.
        offload_weights: Whether the weights are in host memory (stage 3).
        pinned: Whether that host memory is pinned.
        master: Bytes of a master, and of the gradient that its optimizer reads.
        overlaps: Whether gathering and reducing run beside the compute, on streams of their own.
    """

    stage: int
    ranks: int
    accumulate: int
    bucket: int
    prefetch: int = 0
    live: int = 0
    persistence: int = 0
    sub_group: int = 0
    offload: bool = False
    offload_weights: bool = False
    pinned: bool = False
    master: int = 4
    overlaps: bool = False


@dataclass(frozen=True)
class Counts:
    """Elements of one role's parameters, and their bytes.

    Attributes:
        trained: Parameters with gradients; parameters in 4 bits do not count.
        frozen: Parameters without gradients; parameters in 4 bits do not count.
        largest: Elements of the largest trained tensor.
        element: Bytes of a weight.
        moments: Bytes of both Adam moments of a parameter.
        quantized: Parameters in 4 bits.
        scales: Bytes of quantisation scales per parameter in 4 bits.
        small: Elements in tensors below the persistence threshold.
        oversized: Elements in trained tensors larger than a bucket.
        together: Elements of a layer's experts, which stage 3 gathers together.
        kept: Elements of experts that autograd keeps gathered until their backward pass.
    """

    trained: int
    frozen: int
    largest: int
    element: int
    moments: float = 8.0
    quantized: int = 0
    scales: float = 0.0
    small: int = 0
    oversized: int = 0
    together: int = 0
    kept: int = 0

    @property
    def stored(self) -> int:
        """The number of elements in which all weights are stored, with weights in 4 bits packed."""
        return self.trained + self.frozen + self.quantized // 2 // self.element


def zero_sizes(settings: dict[str, Any], ranks: int) -> ZeroSizes:
    """Return the sizes in DeepSpeed's settings that memory depends on."""
    zero = settings["zero_optimization"]
    optimizer, parameter = zero.get("offload_optimizer"), zero.get("offload_param")
    narrow = settings.get("data_types", {}).get("grad_accum_dtype") == "bf16"
    return ZeroSizes(
        stage=zero["stage"],
        ranks=ranks,
        accumulate=2 if narrow else 4,
        bucket=zero["reduce_bucket_size"],
        prefetch=zero.get("stage3_prefetch_bucket_size", 0),
        live=zero.get("stage3_max_live_parameters", 0),
        persistence=zero.get("stage3_param_persistence_threshold", 0),
        sub_group=zero.get("sub_group_size", 0),
        offload=optimizer is not None,
        offload_weights=parameter is not None,
        pinned=any(o is not None and o["pin_memory"] for o in (optimizer, parameter)),
        master=2 if settings["bf16"].get("bf16_master_weights_and_grads") else 4,
        overlaps=zero["overlap_comm"],
    )


def moment_bytes(role: TrainedRole) -> float:
    """Return the bytes of both Adam moments of a trained parameter."""
    kind, zero = role.optimizer.kind, role.settings_of(ZeroConfig)
    return 4.0 if kind == "adamw" and zero.state_dtype == "bfloat16" else _MOMENTS[kind]


def trained_counts(
    role: TrainedRole, shape: ModelShape, head: HeadKind, sizes: ZeroSizes
) -> Counts:
    """Return the elements of a role that learns: with and without gradients, in 16 and 4 bits."""
    base = frozen_counts(role.model, shape, head, sizes)
    kept = kept_experts(role.model, shape)
    base = replace(base, moments=moment_bytes(role), kept=kept)
    if role.adapter is None:
        tensors = parameter_tensors(shape, head == "value")
        frozen = frozen_parameters(role, shape)
        return replace(
            base,
            trained=base.frozen - frozen,
            frozen=frozen,
            largest=shape.largest_parameter,
            oversized=sum(t.parameters for t in tensors if t.elements > sizes.bucket),
        )
    pairs, whole = adapter_tensors(shape, role.adapter), whole_tensors(shape, role.adapter)
    elements = [elements for _, elements in pairs] + whole
    return replace(
        base,
        trained=trained_parameters(role, shape, head),
        frozen=base.frozen - (shape.hidden if head == "value" else 0) - sum(whole),
        largest=max(elements, default=0),  # a wrong target wraps nothing
        oversized=sum(size for size in whole if size > sizes.bucket),
        small=base.small + sum(c * e for c, e in pairs if e <= sizes.persistence),
    )


def frozen_counts(
    model: ModelConfig, shape: ModelShape, head: HeadKind, sizes: ZeroSizes
) -> Counts:
    """Return the element counts of a model that only scores; `small` is 0 below stage 3."""
    value, nf4 = head == "value", model.quantization == "nf4"
    whole = shape.value_parameters if value else shape.parameters
    plain = (linear for linear in shape.linears if linear.stacked == 1)
    quantized = sum(x.count * x.inputs * x.outputs for x in plain) if nf4 else 0
    codes = 2 * model.element if nf4 else 1  # 4-bit codes that are stored as one element
    small = small_parameters(shape, sizes.persistence, codes, value) if sizes.stage == 3 else 0
    return Counts(
        trained=0,
        frozen=whole - quantized,
        largest=0,
        element=model.element,
        quantized=quantized,
        scales=_NF4_DOUBLE if model.double_quantization else _NF4,
        small=small,
        together=_gathered_together(shape, sizes),
    )


def kept_experts(model: ModelConfig, shape: ModelShape) -> int:
    """Return the elements of gathered experts that stage 3 cannot free before the backward pass.

    transformers gives grouped products a view of transposed weights (integrations/moe.py,
    `_grouped_linear`), which autograd keeps, and with it their memory. Checkpointed layers keep
    none, and neither does gpt-oss, whose weights need no view.
    """
    if shape.traits.clamped_experts:
        return 0
    experts = sum(each.parameters for each in shape.linears if each.stacked > 1)
    checkpointed = ceil(shape.layers / model.checkpoint_every)
    whole = shape.layers - (checkpointed if model.gradient_checkpointing else 0)
    return experts * whole // shape.layers


def _gathered_together(shape: ModelShape, sizes: ZeroSizes) -> int:
    """Return the elements of a layer's routed block, which stage 3 gathers at once; 0 without one.

    All experts of a layer are direct parameters of one module, and DeepSpeed takes the block around
    them for a leaf (runtime/zero/leaf_module_config.py): router and shared expert come with them.
    """
    routers, linears = shape.routers, shape.linears
    if not routers.elements:
        return 0
    layers = routers.parameters // routers.elements
    experts = sum(each.parameters for each in linears if each.stacked > 1) // layers
    shared = 3 * shape.hidden * shape.shared_intermediate
    router = routers.elements if routers.elements > sizes.persistence else 0
    return experts + shared + router


def is_bf16_optimizer(counts: Counts, sizes: ZeroSizes) -> bool:
    """Return whether DeepSpeed chooses BF16_Optimizer.

    The choice is made in runtime/engine.py, _do_optimizer_sanity_check.
    """
    return sizes.stage == 1 and is_compact(counts, sizes) and not sizes.offload


def is_compact(counts: Counts, sizes: ZeroSizes) -> bool:
    """Return whether a rank's gradients are added up in fp32.

    See _use_compact_grad_partition_buffer.
    """
    return counts.element == 2 and sizes.accumulate == 4


def largest_share(counts: Counts, sizes: ZeroSizes) -> int:
    """Return the most elements of the largest gradient that one rank gets.

    Below stage 3 all gradients are divided as one row, so a rank may get the full gradient; stage 3
    divides each gradient.
    """
    divided = counts.largest if sizes.stage == 3 else counts.trained
    return min(counts.largest, -(-divided // sizes.ranks))
