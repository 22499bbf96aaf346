"""What is set in DeepSpeed when a rank joins the others."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from deepspeed.accelerator import cuda_accelerator

from plimsoll.engine.process_group import ask_cuda_for_free_memory


def test_a_cards_free_memory_is_known_where_cards_have_uuids(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    accelerator = cuda_accelerator.CUDA_Accelerator()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-5f2c")
    nvml = SimpleNamespace(nvmlDeviceGetHandleByIndex=int)
    monkeypatch.setattr(cuda_accelerator, "pynvml", nvml)  # as where there is a driver
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device=None: (7, 9))
    with pytest.raises(ValueError, match="GPU-5f2c"):  # DeepSpeed's own: what this is for
        accelerator.available_memory()
    ask_cuda_for_free_memory(accelerator)
    assert accelerator.available_memory() == accelerator.available_memory(0) == 7
