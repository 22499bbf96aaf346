"""What is set, in DeepSpeed and for gloo, when a rank joins the others."""

from __future__ import annotations

from types import SimpleNamespace

import psutil
import pytest
import torch
from deepspeed.accelerator import cuda_accelerator

from plimsoll.engine.process_group import ask_cuda_for_free_memory, interface_to


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


def test_gloo_takes_the_interface_that_reaches_the_first_rank(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Not that of the machine's own name, which may be known to no one, or stand for 127.0.1.1."""
    monkeypatch.setattr("socket.gethostname", lambda: "known-to-no-one.invalid")
    loopback = interface_to("127.0.0.1", 1)
    assert loopback is not None and interface_to("localhost", 1) == loopback
    assert "127.0.0.1" in {one.address for one in psutil.net_if_addrs()[loopback]}
