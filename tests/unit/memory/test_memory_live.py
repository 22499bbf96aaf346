"""What cgroups leave to a process, and which cards and processes the driver shows."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from plimsoll.errors import PlimsollError
from plimsoll.machine import host, nvidia
from plimsoll.machine.cgroup import core_quota, memory_limit
from plimsoll.machine.host import HostMemory, live_host, usable_cores
from plimsoll.machine.nvidia import (
    BusyMeter,
    CardProcess,
    LiveCard,
    card_order,
    complete_uuids,
    live_cards,
    visible_cards,
)

MIB, GIB = 2**20, 2**30


def write(folder: Path, **files: object) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(f"{text}\n")


def member(tmp_path: Path, *lines: str) -> Path:
    file = tmp_path / "cgroup"
    file.write_text("".join(f"{line}\n" for line in lines))
    return file


def test_version_2_counts_every_level_and_gives_caches_back(tmp_path: Path) -> None:
    root = tmp_path / "sys"
    write(root / "a", memory__max=8 * GIB, memory__current=7 * GIB, memory__stat="anon 1")
    write(
        root / "a/b",
        memory__max=4 * GIB,
        memory__current=3 * GIB,
        memory__stat=f"anon 5\ninactive_file {2 * GIB}",
    )
    write(root / "a/b/c", memory__max="max", memory__current=GIB)
    limit = memory_limit(member(tmp_path, "0::/a/b/c"), root)
    assert limit == (4 * GIB, 1 * GIB)  # of b in all, of a what is left


def test_version_1_is_below_its_controller(tmp_path: Path) -> None:
    root = tmp_path / "sys"
    write(
        root / "memory/job",
        memory__limit_in_bytes=2 * GIB,
        memory__usage_in_bytes=GIB,
        memory__stat=f"total_inactive_file {GIB // 2}",
    )
    write(root / "memory", memory__limit_in_bytes=2**63 - 4096, memory__usage_in_bytes=9 * GIB)
    groups = member(tmp_path, "5:cpu:/elsewhere", "4:memory:/job", "0::/")
    assert memory_limit(groups, root) == (2 * GIB, 3 * GIB // 2)


def test_a_container_sees_its_own_group_as_the_root(tmp_path: Path) -> None:
    root = tmp_path / "sys"
    write(root, memory__max=GIB, memory__current=2 * GIB)
    assert memory_limit(member(tmp_path, "0::/docker/abc"), root) == (GIB, 0)


def test_without_groups_there_is_no_limit(tmp_path: Path) -> None:
    assert memory_limit(tmp_path / "none", tmp_path) is None
    assert memory_limit(member(tmp_path, "0::/"), tmp_path) is None


def test_the_tightest_quota_of_cores_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "2"
    write(root / "a", cpu__max="150000 100000")
    write(root / "a/b", cpu__max="max 100000")
    member_of_b = member(tmp_path, "0::/a/b")
    assert core_quota(member_of_b, root) == 1.5
    assert core_quota(member(tmp_path, "0::/"), root) is None
    first = tmp_path / "1"
    write(first / "cpu", cpu__cfs_quota_us=-1, cpu__cfs_period_us=100000)
    write(first / "cpu/job", cpu__cfs_quota_us=250000, cpu__cfs_period_us=50000)
    assert core_quota(member(tmp_path, "2:cpu,cpuacct:/job", "0::/"), first) == 5
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(64)))
    for quota, cores in ((None, 64), (1.5, 2), (0.25, 1), (96.0, 64)):
        monkeypatch.setattr(host, "core_quota", lambda quota=quota: quota)
        assert usable_cores() == cores


@pytest.mark.parametrize(
    ("limit", "available", "expected"),
    [
        (None, 60, (100, 60)),
        ((50, 45), 60, (50, 45)),
        ((50, 45), 10, (50, 10)),
        ((200, 9), 60, (100, 60)),
    ],
)
def test_the_tighter_of_machine_and_group_counts(
    limit: tuple[int, int] | None,
    available: int,
    expected: tuple[int, int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    machine = SimpleNamespace(total=100, available=available)
    monkeypatch.setattr(host, "memory_limit", lambda: limit)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: machine)
    assert live_host() == HostMemory(100, *expected)


def test_this_machine_has_memory() -> None:
    here = live_host()
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert 0 < here.free_bytes <= here.capacity_bytes <= here.total_bytes
    assert here.total_bytes == pytest.approx(pages, rel=0.01)


def test_cards_and_the_processes_on_them(tell_cards: Callable[..., None]) -> None:
    held = [(77, "python train.py, now", 29000), (78, None, None)]
    tell_cards(
        (
            "0, GPU-a, NVIDIA A100-SXM4-80GB, 81920, 768, 30000, 8.0, 570.1, Disabled",
            {"processes": held},
        ),
        "1, GPU-b, NVIDIA A100-SXM4-80GB, 81920, 768, 4, 8.0, 570.1, Disabled",
    )
    busy, idle = live_cards()
    assert busy.usable_bytes == 81152 * MIB and busy.free_bytes == 51152 * MIB
    assert (busy.compute_capability, busy.driver) == ((8, 0), "570.1")
    assert busy.processes == (
        CardProcess(77, "python train.py, now", 29000 * MIB),
        CardProcess(78, "[Not Found]", None),
    )
    assert idle.index == 1 and idle.processes == ()


def test_cards_are_numbered_as_the_driver_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_DEVICE_ORDER", raising=False)
    assert card_order() == {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "FASTEST_FIRST")
    assert card_order() == {}


@pytest.mark.skipif(Path("/dev/nvidiactl").exists(), reason="there is a driver")
def test_no_driver_no_cards() -> None:
    assert live_cards() == ()


def test_a_hanging_driver_is_an_error(
    tell_cards: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    tell_cards()
    monkeypatch.setattr(sys.modules["pynvml"], "nvmlInit", lambda: time.sleep(5))
    monkeypatch.setattr(nvidia, "_TIMEOUT", 0.1)
    with pytest.raises(PlimsollError, match=r"nvidia-smi .* 0\.1 s"):
        live_cards()


@pytest.mark.parametrize(
    ("visible", "seen"),
    [
        (None, [0, 1, 2]),
        ("", []),
        ("-1", []),
        ("1", [1]),
        ("2, 0", [2, 0]),
        ("GPU-b1", [1]),
        ("0,7,1", [0]),
        ("GPU-", []),
        ("MIG-c4", [2]),
    ],
)
def test_visible_devices_are_read_as_cuda_reads_them(visible: str | None, seen: list[int]) -> None:
    cut = tuple(card_of(2, uuid) for uuid in ("MIG-c3", "MIG-c4"))
    parts = ((), (), cut)
    cards = [
        replace(card_of(index, uuid), instances=parts[index])
        for index, uuid in enumerate(("GPU-a0", "GPU-b1", "GPU-c2"))
    ]
    assert [card.index for card in visible_cards(cards, visible)] == seen


@pytest.mark.parametrize(
    ("visible", "whole"),
    [
        ("GPU-a", "GPU-a0"),
        ("1,GPU-c2", "1,GPU-c2"),
        ("MIG-c4, GPU-b", "MIG-c4,GPU-b1"),
        ("GPU-", "GPU-"),
        ("GPU-d", "GPU-d"),
    ],
)
def test_the_beginning_of_a_uuid_is_completed(visible: str, whole: str) -> None:
    cut = (card_of(2, "MIG-c3"), card_of(2, "MIG-c4"))
    cards = [card_of(0, "GPU-a0"), card_of(1, "GPU-b1"), card_of(2, "GPU-c2")]
    cards[2] = replace(cards[2], instances=cut)
    assert complete_uuids(cards, visible) == whole


def card_of(index: int, uuid: str) -> LiveCard:
    return LiveCard(index, uuid, "T4", 1, 0, 0, (7, 5), "1", ())


def test_how_busy_a_card_was_is_the_mean_of_the_samples_since_the_last_reading(
    tell_cards: Callable[..., None],
) -> None:
    def told(*samples: tuple[int, int]) -> None:
        card = "0, GPU-a, NVIDIA A100-SXM4-80GB, 81920, 768, 4, 8.0, 570.1, Disabled"
        tell_cards((card, {"samples": samples}))

    told((5, 100), (11, 50), (12, 100))  # the first is from before the meter
    meter = BusyMeter(sys.modules["pynvml"], "GPU-a", since=10)
    assert meter.read() == 0.75
    assert meter.read() is None  # nothing new
    told((12, 100), (13, 0), (14, 25), (15, 50))
    assert meter.read() == 0.25
    told()
    assert meter.read() is None
    assert BusyMeter(sys.modules["pynvml"], "GPU-of-no-card", since=0).read() is None


def test_without_a_driver_nothing_is_known_of_a_card(
    tell_cards: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    tell_cards()
    monkeypatch.delenv("SAID_CARDS")
    assert BusyMeter(sys.modules["pynvml"], "GPU-a", since=0).read() is None
