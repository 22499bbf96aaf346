"""The DeepSpeed settings of a role, and the device that ranks run on."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from decided import decided_model, decided_role

from plimsoll.config.engine import FrozenRole, OptimizerConfig, TrainedRole
from plimsoll.errors import ConfigError
from plimsoll.machine.host import free_port
from plimsoll.trainer.process_group import check_device
from plimsoll.trainer.zero.config import FrozenZeroConfig, ZeroConfig
from plimsoll.trainer.zero.settings import deepspeed_settings, frozen_settings, zero_settings

STAGES = (0, 1, 2, 3)


def settings_of(stage: int, dtype: str, device: str = "cpu", **zero: Any) -> dict[str, Any]:
    role = TrainedRole(
        model=decided_model("none", dtype=dtype),
        optimizer=OptimizerConfig(max_grad_norm=0.5),
    ).with_engine(ZeroConfig.model_validate({"stage": stage, **zero}))
    role = decided_role(role)
    assert device in ("cpu", "cuda")
    return deepspeed_settings(role, "cuda" if device == "cuda" else "cpu", ranks=3)


def values_of(settings: Any) -> list[object]:
    if isinstance(settings, dict):
        return [value for inner in settings.values() for value in values_of(inner)]
    return [settings]


def test_it_needs_no_torch() -> None:
    script = "import sys, plimsoll.trainer.zero.settings; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.stdout.strip() == "False", done.stderr


@pytest.mark.parametrize("stage", STAGES)
def test_every_value_is_written_out(stage: int) -> None:
    offload = {"optimizer_offload": "cpu"} if stage else {}
    for settings in (
        settings_of(stage, "bfloat16", **offload),
        frozen_settings(
            FrozenRole(model=decided_model(path="none", dtype="bfloat16")).with_engine(
                FrozenZeroConfig(stage=3)
            ),
            "cpu",
            2,
        ),
    ):
        assert "auto" not in values_of(settings) and None not in values_of(settings)


@pytest.mark.parametrize("stage", STAGES)
def test_gradients_are_added_in_fp32_except_at_stage_0_in_bf16(stage: int) -> None:
    accumulated = "bf16" if stage == 0 else "fp32"
    assert settings_of(stage, "bfloat16")["data_types"] == {"grad_accum_dtype": accumulated}
    assert settings_of(stage, "float32")["data_types"] == {"grad_accum_dtype": "fp32"}


def test_deepspeeds_clock_does_not_wait_for_the_card() -> None:
    from deepspeed.utils.config import get_timers_config

    frozen = frozen_settings(
        FrozenRole(model=decided_model(path="none", dtype="bfloat16")).with_engine(
            FrozenZeroConfig(stage=3)
        ),
        "cuda",
        2,
    )
    for settings in (settings_of(2, "bfloat16", "cuda"), frozen):
        assert not get_timers_config(settings).enabled


def test_the_role_decides() -> None:
    settings = settings_of(
        3,
        "bfloat16",
        "cuda",
        optimizer_offload="cpu",
        parameter_offload="cpu",
        bucket_elements=1234,
    )
    zero = settings["zero_optimization"]
    host = {"device": "cpu", "pin_memory": True}
    assert (settings["bf16"]["enabled"], settings["gradient_clipping"]) == (True, 0.5)
    assert settings["train_batch_size"] == 3 and zero["stage"] == 3
    assert zero["offload_optimizer"] == zero["offload_param"] == host
    assert zero["reduce_bucket_size"] == zero["allgather_bucket_size"] == 1234
    assert zero["stage3_prefetch_bucket_size"] == 1234


def test_states_in_bfloat16_are_asked_for_as_deepspeed_wants_it() -> None:
    narrow = {"bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}
    settings = settings_of(2, "bfloat16", state_dtype="bfloat16")
    assert settings["bf16"] == {"enabled": True} | narrow
    assert not any(settings_of(2, "bfloat16")["bf16"][name] for name in narrow)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_cards_reduce_beside_the_backward_pass_at_stage_3(stage: int, device: str) -> None:
    zero = settings_of(stage, "bfloat16", device)["zero_optimization"]
    assert zero["overlap_comm"] == (stage == 3 and device == "cuda")


def test_one_rank_has_nothing_to_overlap() -> None:
    assert not zero_settings(ZeroConfig(stage=3), "cuda", 1)["overlap_comm"]


def test_zero_plus_plus_is_passed_on() -> None:
    asked = settings_of(
        3,
        "bfloat16",
        "cuda",
        quantized_weights=True,
        quantized_gradients=True,
        hpz_partition_size=8,
    )["zero_optimization"]
    names = ("zero_quantized_weights", "zero_quantized_gradients", "zero_hpz_partition_size")
    assert [asked[name] for name in names] == [True, True, 8]
    unasked = settings_of(3, "bfloat16")["zero_optimization"]
    assert [unasked[name] for name in names] == [False, False, 1]


def test_deepspeed_knows_every_setting() -> None:
    """Its own config refuses keys that it does not have."""
    from deepspeed.runtime.precision_config import DeepSpeedBF16Config
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    settings = settings_of(3, "bfloat16", "cuda", state_dtype="bfloat16", hpz_partition_size=8)
    assert DeepSpeedZeroConfig(**settings["zero_optimization"]).zero_hpz_partition_size == 8
    assert DeepSpeedBF16Config(**settings["bf16"]).bf16_optimizer_states


@pytest.mark.parametrize("stage", STAGES)
def test_nothing_is_offloaded_unasked(stage: int) -> None:
    zero = settings_of(stage, "float32")["zero_optimization"]
    assert "offload_optimizer" not in zero and "offload_param" not in zero


def test_a_gpu_that_torch_cannot_use_is_named(
    tell_cards: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A driver that shows a card, and a torch that sees none."""
    tell_cards("0, GPU-a, NVIDIA H100 80GB HBM3, 81559, 561, 4, 9.0, 550.54.15, Disabled")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match=r"H100.*550\.54\.15.*doctor.*cluster\.device: cpu"):
        check_device("cuda")
    assert check_device("cpu") == "cpu"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA GPU")
def test_cuda_that_is_not_there_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"cluster\.device: cuda.*Write cluster\.device: cpu"):
        check_device("cuda")


def test_a_free_port_is_a_port() -> None:
    assert 1024 <= free_port() < 65536
