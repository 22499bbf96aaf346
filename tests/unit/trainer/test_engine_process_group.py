"""What is set, in DeepSpeed, PyTorch, gloo and NCCL, when a rank joins the others."""

from __future__ import annotations

import socket
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist
from deepspeed.accelerator import cuda_accelerator
from deepspeed.utils import groups
from listeners import listening
from torch._C._distributed_c10d import TCPStore

from plimsoll.machine.host import free_port, network_interface, own_address
from plimsoll.sync.channel import find_store, serve_store
from plimsoll.trainer.process_group import (
    Place,
    ask_cuda_for_free_memory,
    count_ranks_as_cards,
    join,
    leave,
    suit_cards,
)


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


def quantised_groups(ranks: int, cards: Any, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """DeepSpeed's groups for gradients in 4 bits. cards: of a rank's node, as DeepSpeed has it."""
    asked = SimpleNamespace(
        is_initialized=lambda: True,
        get_world_size=lambda: ranks,
        new_group=lambda ranks: list(ranks),
    )
    monkeypatch.setattr(groups, "dist", asked)
    monkeypatch.setattr(groups, "_ALL_TO_ALL_GROUP", {})
    monkeypatch.setattr(groups, "get_accelerator", lambda: cards)
    found: dict[str, Any] = groups._get_local_all_to_all_group()
    return found


def test_ranks_of_a_node_are_one_node_to_deepspeed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four ranks on two nodes, each of which sees one card, as Ray gives it."""
    accelerator = cuda_accelerator.CUDA_Accelerator()
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    wrong = quantised_groups(4, accelerator, monkeypatch)
    assert wrong["local_0"] == [0] and wrong["global_0"] == [0, 1, 2, 3]  # what this is for
    count_ranks_as_cards(accelerator, 2)
    found = quantised_groups(4, accelerator, monkeypatch)
    assert found == {
        "local_0": [0, 1],
        "local_1": [2, 3],
        "global_0": [0, 2],
        "global_1": [1, 3],
    }
    count_ranks_as_cards(accelerator, 4)
    assert quantised_groups(4, accelerator, monkeypatch) == {"local_0": [0, 1, 2, 3]}


def test_gloo_and_nccl_take_the_interface_of_the_nodes_address(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Not that of the machine's own name, which may be known to no one, or stand for 127.0.1.1."""
    monkeypatch.setattr("socket.gethostname", lambda: "known-to-no-one.invalid")
    inet = socket.AddressFamily.AF_INET
    for name, entries in psutil.net_if_addrs().items():
        for address in (one.address for one in entries if one.family == inet):
            own = {"GLOO_SOCKET_IFNAME": name, "NCCL_SOCKET_IFNAME": f"={name}"}
            assert network_interface(address) == own and own_address(address) == address
    assert network_interface("localhost") == network_interface("127.0.0.1")


def test_a_store_is_served_at_one_address() -> None:
    before = listening()
    store = serve_store("127.0.0.1")
    assert listening() - before == {("127.0.0.1", store.port)}
    find_store("127.0.0.1", store.port).set("a", "b")
    assert store.get("a") == b"b"


def test_a_process_alone_serves_no_store() -> None:
    before = listening()
    join(Place(0, 1, "127.0.0.1", free_port(), "cpu", 1))
    try:
        assert {address for address, _ in listening() - before} <= {"127.0.0.1"}  # gloo's own
        assert not isinstance(dist.distributed_c10d._get_default_store(), TCPStore)
    finally:
        leave()


def test_groups_that_deepspeed_makes_wait_as_long_as_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention is not cuDNN's, which prepares each length anew."""
    c10d = dist.distributed_c10d
    monkeypatch.setattr(c10d, "default_pg_nccl_timeout", timedelta(minutes=10))
    before = torch.backends.cuda.cudnn_sdp_enabled()
    try:
        suit_cards()
        assert c10d._get_default_timeout(dist.Backend("nccl")) == timedelta(minutes=30)
        assert not torch.backends.cuda.cudnn_sdp_enabled()
        assert torch.backends.cuda.flash_sdp_enabled()
        assert torch.backends.cuda.mem_efficient_sdp_enabled()
    finally:
        torch.backends.cuda.enable_cudnn_sdp(before)
