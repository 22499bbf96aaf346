"""Checkpoints' files: what some ranks wrote in their division, others read in theirs."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest.mock import patch

import pytest
import torch
from decided import decided_model, decided_role
from examples import percent
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import Tensor

from plimsoll.config.engine import (
    AdapterConfig,
    EmaConfig,
    OptimizerConfig,
    TrainedRole,
)
from plimsoll.errors import ConfigError
from plimsoll.trainer.checkpoint import (
    Stretch,
    block_file,
    read_blocks,
    read_rows,
    read_weights,
    row_files,
    write_files,
)
from plimsoll.trainer.protocol import Steps
from plimsoll.trainer.zero.config import ZeroConfig
from plimsoll.trainer.zero.form import Form, check_shapes, form_file, read_form, shapes_file

Weights = dict[str, Tensor]
ROLE = decided_role(TrainedRole(model=decided_model(path="m", dtype="bfloat16")))


def joined(weights: Weights, ranks: int, rank: int) -> tuple[Tensor, list[Stretch]]:
    """Divide as ZeRO 1 and 2 do: weights one behind the other, padded, cut into equal pieces."""
    whole = torch.cat(list(weights.values()))
    share = -(-len(whole) // ranks)
    padded = torch.cat([whole, torch.zeros(share * ranks - len(whole))])
    begin = rank * share
    parts, at = [], 0
    for name, weight in weights.items():
        held = [i for i in range(len(weight)) if begin <= at + i < begin + share]
        if held:
            parts.append(Stretch(name, held[0], 0, at + held[0] - begin, len(held)))
        at += len(weight)
    return padded[begin : begin + share].clone(), parts


def shared(weights: Weights, ranks: int, rank: int) -> tuple[Tensor, list[Stretch]]:
    """Divide as ZeRO 3 does: each weight padded and cut into equal pieces."""
    pieces, parts, at = [], [], 0
    for name, weight in weights.items():
        share = -(-len(weight) // ranks)
        padded = torch.cat([weight, torch.zeros(share * ranks - len(weight))])
        pieces.append(padded[rank * share : (rank + 1) * share])
        held = len(range(rank * share, min((rank + 1) * share, len(weight))))
        if held:
            parts.append(Stretch(name, rank * share, 0, at, held))
        at += share
    return torch.cat(pieces), parts


DIVISIONS = {"joined": joined, "shared": shared}


@settings(max_examples=percent(40))
@given(
    sizes=st.lists(st.integers(1, 30), min_size=1, max_size=5),
    before=st.tuples(st.sampled_from(sorted(DIVISIONS)), st.integers(1, 4)),
    after=st.tuples(st.sampled_from(sorted(DIVISIONS)), st.integers(1, 4)),
    file_bytes=st.integers(4, 200),
)
def test_parts_for_another_number_of_ranks_hold_the_written_values(
    sizes: Sequence[int], before: tuple[str, int], after: tuple[str, int], file_bytes: int
) -> None:
    weights = {f"layer/{i}.weight": torch.randn(size) for i, size in enumerate(sizes)}
    squares = {name: weight**2 for name, weight in weights.items()}
    with (
        TemporaryDirectory() as home,
        patch("plimsoll.trainer.checkpoint.CHECKPOINT_FILE", file_bytes),
    ):
        kind, ranks = before
        for rank in range(ranks):
            row, parts = DIVISIONS[kind](weights, ranks, rank)
            square, _ = DIVISIONS[kind](squares, ranks, rank)
            write_files(row_files({"master": [row], "exp_avg": [square]}, parts, rank), Path(home))
        kind, ranks = after
        for rank in range(ranks):
            row, parts = DIVISIONS[kind](weights, ranks, rank)
            square, _ = DIVISIONS[kind](squares, ranks, rank)
            found = {"master": [torch.zeros_like(row)], "exp_avg": [torch.zeros_like(row)]}
            read_rows(found, parts, Path(home))
            assert torch.equal(found["master"][0], row)
            assert torch.equal(found["exp_avg"][0], square)


def test_a_lost_file_is_an_error_that_counts_the_missing_elements(tmp_path: Path) -> None:
    weights = {"w": torch.arange(10.0)}
    for rank in range(2):
        row, parts = joined(weights, 2, rank)
        write_files(row_files({"master": [row]}, parts, rank), tmp_path)
    (tmp_path / "rank-00001-00000.safetensors").unlink()
    row, parts = joined(weights, 1, 0)
    with pytest.raises(ConfigError, match=r"\b5 .*elements"):
        read_rows({"master": [row]}, parts, tmp_path)


def test_a_torn_file_is_refused(tmp_path: Path) -> None:
    row, parts = joined({"w": torch.arange(10.0)}, 1, 0)
    write_files(row_files({"master": [row]}, parts, 0), tmp_path)
    (file,) = tmp_path.iterdir()
    file.write_bytes(file.read_bytes()[:-4])
    with pytest.raises(ConfigError, match="holds no whole checkpoint"):
        read_rows({"master": [row]}, parts, tmp_path)


def test_a_changed_byte_is_refused(tmp_path: Path) -> None:
    row, parts = joined({"w": torch.arange(10.0)}, 1, 0)
    write_files(row_files({"master": [row]}, parts, 0), tmp_path)
    write_files([block_file([{"state1": torch.arange(5, dtype=torch.uint8)}], 0)], tmp_path)
    for file in tmp_path.iterdir():
        data = file.read_bytes()
        file.write_bytes(data[:-2] + bytes([data[-2] ^ 1]) + data[-1:])
    with pytest.raises(ConfigError, match="master/0/w is not what was written"):
        read_rows({"master": [row]}, parts, tmp_path)
    with pytest.raises(ConfigError, match="master/0/w is not what was written"):
        read_weights(tmp_path, "master")
    with pytest.raises(ConfigError, match="0/state1 is not what was written"):
        read_blocks(tmp_path, 0)


def test_a_checkpoint_without_checksums_is_read(tmp_path: Path) -> None:
    row, parts = joined({"w": torch.zeros(3)}, 1, 0)
    save_file({"master/0/w": torch.arange(3.0)}, tmp_path / "rank-00000-00000.safetensors")
    read_rows({"master": [row]}, parts, tmp_path)
    assert torch.equal(row, torch.arange(3.0))


OTHERS = {
    "optimizer.kind: adamw -> adamw_8bit": ROLE.model_copy(
        update={"optimizer": OptimizerConfig(kind="adamw_8bit")}
    ),
    "ema: none -> given": ROLE.model_copy(update={"ema": EmaConfig()}),
    "adapter: none -> given": ROLE.model_copy(update={"adapter": AdapterConfig(rank=4)}),
    "model.quantization: none -> nf4": ROLE.model_copy(
        update={"model": decided_model(path="m", quantization="nf4", dtype="bfloat16")}
    ),
}


@pytest.mark.parametrize("said", OTHERS)
def test_what_is_trained_otherwise_is_refused(said: str, tmp_path: Path) -> None:
    write_files([form_file(Form.of(ROLE, 1), Steps(3))], tmp_path)
    with pytest.raises(ConfigError, match=re.escape(f"(then -> now): {said}. ")):
        read_form(Form.of(OTHERS[said], 1), tmp_path)


def test_only_differing_settings_of_an_adapter_are_listed(tmp_path: Path) -> None:
    """How it is divided may differ, and is not listed."""
    before, now = (
        ROLE.model_copy(update={"adapter": AdapterConfig(rank=rank, targets=targets)})
        for rank, targets in ((4, ("q_proj",)), (8, ("q_proj", "v_proj")))
    )
    write_files([form_file(Form.of(before, 2), Steps(3))], tmp_path)
    with pytest.raises(ConfigError) as refusal:
        read_form(Form.of(now, 1), tmp_path)
    message = "adapter.rank: 4 -> 8, adapter.targets: [q_proj] -> [q_proj, v_proj]. "
    assert f"(then -> now): {message}" in str(refusal.value)


def test_another_division_is_read_and_of_8_bit_moments_refused(tmp_path: Path) -> None:
    divided = {"zero": ZeroConfig(stage=3, optimizer_offload="cpu")}
    write_files([form_file(Form.of(ROLE, 2), Steps(3, 2, 1))], tmp_path)
    assert read_form(Form.of(ROLE.model_copy(update=divided), 5), tmp_path) == Steps(3, 2, 1)

    small = OTHERS["optimizer.kind: adamw -> adamw_8bit"]
    write_files([form_file(Form.of(small, 2), Steps(3))], tmp_path)
    assert read_form(Form.of(small, 2), tmp_path) == Steps(3)
    refusal = r"now\): cluster.ranks: 2 -> 1. Moments in 8 bits are quantised in blocks"
    with pytest.raises(ConfigError, match=refusal):
        read_form(Form.of(small, 1), tmp_path)


def test_a_form_of_another_version_is_refused(tmp_path: Path) -> None:
    (tmp_path / "form.json").write_text(json.dumps({"ranks": 1, "stage": 2}))
    with pytest.raises(ConfigError, match=r"holds no whole checkpoint .*form\.json"):
        read_form(Form.of(ROLE, 1), tmp_path)


def test_weights_of_another_model_are_refused(tmp_path: Path) -> None:
    """Also of a smaller one, of which the checkpoint holds every element."""
    write_files([shapes_file(torch.nn.Linear(6, 4))], tmp_path)
    check_shapes(torch.nn.Linear(6, 4), tmp_path)
    for other, message in (
        (torch.nn.Linear(4, 6), r"weight: \[4, 6\] -> \[6, 4\], bias: \[4\] -> \[6\]\. Give"),
        (torch.nn.Linear(6, 4, bias=False), r"bias: \[4\] -> none\. Give"),
        (torch.nn.LSTM(6, 4), r"weight: \[4, 6\] -> none, .*, weight_ih_l0: none .* and more"),
    ):
        with pytest.raises(ConfigError, match=message):
            check_shapes(other, tmp_path)
    (tmp_path / "weights.json").unlink()
    with pytest.raises(ConfigError, match=r"no whole checkpoint .*weights\.json"):
        check_shapes(torch.nn.Linear(6, 4), tmp_path)


def test_a_checkpoint_of_the_first_version_is_read() -> None:
    """Two ranks wrote it; a single rank reads it."""
    stored = Path(__file__).parent / "checkpoint_1"
    assert read_form(Form.of(ROLE, 1), stored) == Steps(3)
    check_shapes(torch.nn.Linear(3, 2), stored)
    kinds = ("master", "exp_avg", "exp_avg_sq")
    rows = {kind: [torch.zeros(8)] for kind in kinds}
    read_rows(rows, [Stretch("weight", 0, 0, 0, 6), Stretch("bias", 0, 0, 6, 2)], stored)
    expected = torch.tensor([0.0, 1, 2, 3, 4, 5, 10, 20])
    assert torch.equal(rows["master"][0], expected)
    assert torch.equal(rows["exp_avg"][0], expected / 8)
    assert torch.equal(rows["exp_avg_sq"][0], expected**2)
