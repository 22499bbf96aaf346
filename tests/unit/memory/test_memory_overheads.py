"""The constants, and calibrations in files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from plimsoll.commands.planning import constants_of
from plimsoll.config.cluster import ClusterConfig
from plimsoll.errors import ConfigError
from plimsoll.memory.contents.layout import Process, ProcessKind, Slot
from plimsoll.memory.contents.overheads import (
    FIXED_SEGMENTS_GAP,
    NUMBERS,
    Constants,
    process_items,
    read_constants,
    write_constants,
)


def test_every_number_has_a_source() -> None:
    assert set(Constants().sources) == set(NUMBERS)
    assert all(Constants().sources.values())


def test_a_calibration_survives_its_file(tmp_path: Path) -> None:
    file = tmp_path / "calibration.json"
    made = Constants().with_measured("run 7, one H100", cuda_context=123, allocator_gap=0.08)
    write_constants(made, file)
    read = read_constants(file)
    assert read == made
    assert read.cuda_context == 123
    assert read.sources["cuda_context"] == "run 7, one H100"
    assert read.sources["ray_node"] == Constants().sources["ray_node"]


def test_a_calibration_may_have_some_numbers_only(tmp_path: Path) -> None:
    file = tmp_path / "calibration.json"
    file.write_text(json.dumps({"allocator_gap": {"value": 0.1, "source": "here"}}))
    read = read_constants(file)
    assert read.allocator_gap == 0.1
    assert read.worker_process == Constants().worker_process


@pytest.mark.parametrize(
    "content",
    [
        "no json",
        "[]",
        '{"cuda_contexts": {"value": 1, "source": "x"}}',
        '{"cuda_context": {"value": -1, "source": "x"}}',
        '{"cuda_context": {"value": "1 GiB", "source": "x"}}',
        '{"cuda_context": {"value": true, "source": "x"}}',
        '{"cuda_context": {"value": NaN, "source": "x"}}',
        '{"cuda_context": {"source": "x"}}',
        '{"cuda_context": 7}',
    ],
)
def test_what_is_no_calibration_is_refused(tmp_path: Path, content: str) -> None:
    file = tmp_path / "calibration.json"
    file.write_text(content)
    with pytest.raises(ConfigError, match=r"calibration\.json is no calibration"):
        read_constants(file)


def test_no_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is no calibration"):
        read_constants(tmp_path / "absent.json")


@pytest.mark.parametrize(
    ("kind", "processes"), [("local", 1), ("controller", 1), ("rank", 1), ("engine", 2), ("ray", 0)]
)
def test_torch_for_cuda_weighs_in_each_process_without_a_card(
    kind: ProcessKind, processes: int
) -> None:
    """An engine has its core beside it; Ray's own processes do not import torch."""
    process = Process(kind, 0, Slot(0))

    def held(*, cuda_build: bool) -> int:
        items = process_items(process, "cpu", 1, 0, "engine_process", cuda_build, Constants())
        return sum(item.bytes for item in items)

    more = held(cuda_build=True) - held(cuda_build=False)
    assert more == processes * Constants().cuda_build


def test_on_cards_torchs_build_is_part_of_cudas_libraries() -> None:
    items = process_items(
        Process("rank", 0, Slot(0, 0)), "cuda", 1, 0, "engine_process", True, Constants()
    )
    assert "torch's CUDA build" not in [item.name for item in items]


@pytest.mark.parametrize(
    ("settings", "gap"),
    [
        ("", Constants().allocator_gap),
        ("expandable_segments:True", Constants().allocator_gap),
        ("max_split_size_mb:128", FIXED_SEGMENTS_GAP),
        ("expandable_segments:False", FIXED_SEGMENTS_GAP),
    ],
)
def test_a_plan_counts_the_segments_that_the_environment_chooses(
    settings: str, gap: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF", raising=False)
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", settings)
    assert constants_of(ClusterConfig()).allocator_gap == gap
