"""Weights from a rank's card to engines: by CUDA IPC on the same card, by NCCL to another."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import metrics
from test_gpu_runs import STEPS, check, needs_vllm, shared
from test_sync_channel import End, answer, engines, tensors_of
from test_sync_channel import check as check_bucket

from plimsoll.sync.buckets import checksums, ship_bucket, weighted_sum
from plimsoll.sync.channel import Channel, expand_segments, open_outlet

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available(), reason="needs a CUDA GPU: `make BACKEND=gpu test-gpu`"
    ),
]
needs_two = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
CARD = torch.device("cuda", 0)
LARGEST = 2**22


def test_a_card_sums_as_the_cpu_does() -> None:
    generator = torch.Generator().manual_seed(0)
    words = torch.randint(-(2**62), 2**62, (5 * 2**18 + 7,), generator=generator)
    sizes = [8 * 3, 8 * (5 * 2**18), 8 * 4]
    pieces = words.split([size // 8 for size in sizes])
    expected = [int(weighted_sum(piece)) for piece in pieces]
    assert checksums(words.view(torch.uint8).to(CARD), sizes) == expected


@pytest.mark.parametrize("expandable", [True, False])
def test_another_process_maps_the_card_and_the_memory_comes_back(expandable: bool) -> None:
    """Also where the allocator makes growing segments, which CUDA IPC cannot share."""
    expand_segments(expandable)
    kept = torch.empty(2 * LARGEST, dtype=torch.uint8, device=CARD)  # leaves a growing block
    del kept
    before = torch.cuda.memory_allocated(CARD)
    outlet = open_outlet(Channel("ipc", LARGEST, readers=1), CARD)
    channel = outlet.channel
    with engines(End(channel, device=CARD)) as [connection]:
        for number in range(5):
            bucket = ship_bucket({n: t.to(CARD) for n, t in tensors_of(number).items()}, outlet)
            check_bucket(bucket, answer(connection), number)
        assert torch.cuda.memory_allocated(CARD) >= before + 2 * LARGEST
    outlet.close()
    torch.cuda.ipc_collect()
    assert torch.cuda.memory_allocated(CARD) < before + LARGEST


@needs_two
def test_nccl_broadcasts_to_another_card() -> None:
    outlet = open_outlet(Channel("nccl", LARGEST, readers=1), CARD)
    channel = outlet.channel
    with engines(End(channel, device=torch.device("cuda", 1))) as [connection]:
        for number in range(5):
            bucket = ship_bucket({n: t.to(CARD) for n, t in tensors_of(number).items()}, outlet)
            check_bucket(bucket, answer(connection), number)
        outlet.close()


def test_host_memory_is_pinned_and_read_by_a_card() -> None:
    outlet = open_outlet(Channel("host", LARGEST, readers=1), CARD)
    channel = outlet.channel
    with engines(End(channel, device=CARD)) as [connection]:
        for number in range(5):
            bucket = ship_bucket({n: t.to(CARD) for n, t in tensors_of(number).items()}, outlet)
            check_bucket(bucket, answer(connection), number)
    outlet.close()


def by_route(config: dict[str, Any], route: str) -> dict[str, Any]:
    changed = copy.deepcopy(config)
    changed["rollout"]["sync"] = {**changed["rollout"].get("sync", {}), "route": route}
    return changed


@needs_vllm
@pytest.mark.parametrize("route", ["ipc", "host"])
@pytest.mark.parametrize("sleep_level", [0, 2])
def test_ppo_by_route_on_the_same_card(route: str, sleep_level: int, tmp_path: Path) -> None:
    rows = check(tmp_path, by_route(shared(sleep_level), route))
    assert all(row[f"sync/bytes/{route}"] > 0 for row in rows[1:])
    assert len(metrics(tmp_path / "ppo")) == STEPS + 1


@needs_vllm
@pytest.mark.parametrize("quantization", ["none", "nf4"])
def test_ppo_sends_a_merged_adapter_by_ipc(quantization: str, tmp_path: Path) -> None:
    """After the first sync of a quantised base, only layers with an adapter are sent."""
    config = by_route(shared(0), "ipc")
    config["actor"]["adapter"] = {"rank": 8, "targets": ["q_proj"]}
    config["actor"]["model"]["quantization"] = quantization
    check(tmp_path, config)


@needs_vllm
@needs_two
def test_ppo_by_nccl_to_an_engine_on_its_own_card(tmp_path: Path) -> None:
    config = shared(0)
    config["rollout"]["placement"] = "own"
    rows = check(tmp_path, config)
    assert all(row["sync/bytes/nccl"] > 0 for row in rows[1:])
