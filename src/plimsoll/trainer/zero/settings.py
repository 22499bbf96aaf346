"""The DeepSpeed settings of a role, built from its config.

They are torch-free: the plan prices the same settings that will run.
"""

from __future__ import annotations

from plimsoll.config.cluster import Device
from plimsoll.config.engine import FrozenRole, TrainedRole
from plimsoll.trainer.zero.config import FrozenZeroConfig, ZeroConfig

_SHORT = {"bfloat16": "bf16", "float32": "fp32"}


def deepspeed_settings(role: TrainedRole, device: Device, ranks: int) -> dict[str, object]:
    """Return DeepSpeed's config for a trained role.

    `managed_gradient_accumulation: false` lets `step()` be the boundary, so that a step may hold
    any number of micro-batches. The learning rate is set before every step by the engine, and
    losses are divided by global counts before they come here, hence no scaling of any kind.
    """
    zero = role.settings_of(ZeroConfig)
    return {
        **_common(ranks),
        "managed_gradient_accumulation": False,
        "gradient_clipping": role.optimizer.max_grad_norm,
        "bf16": _bfloat16(role),
        "zero_optimization": zero_settings(zero, device, ranks),
        "zero_allow_untested_optimizer": True,
        "data_types": {"grad_accum_dtype": _SHORT[zero.gradient_dtype]},
    }


def _bfloat16(role: TrainedRole) -> dict[str, object]:
    narrow = role.settings_of(ZeroConfig).state_dtype == "bfloat16"
    return {
        "enabled": role.model.dtype == "bfloat16",
        "bf16_master_weights_and_grads": narrow,
        "bf16_optimizer_states": narrow,
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
    offload = role.settings_of(FrozenZeroConfig).offload
    zero = ZeroConfig(stage=3, parameter_offload=offload)
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
