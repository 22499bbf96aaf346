"""Checkpoints and run directories that are damaged: refused by file, line or field."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from examples import percent
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from refused import DEEP, NO_OBJECTS, each, refusal, refused_command

from plimsoll.errors import ConfigError
from plimsoll.run.state import RunState
from plimsoll.trainer.checkpoint import (
    Stretch,
    block_file,
    read_blocks,
    read_rows,
    read_weights,
    row_files,
    write_files,
)

STATE: dict[str, object] = {
    "step": 1,
    "data_position": 1,
    "data_rows": 1,
    "weight_version": 1,
    "kl_coefficient": 0.0,
    "seconds": 1.0,
}
PARTS = [Stretch("w", 0, 0, 0, 6), Stretch("v", 0, 0, 6, 4)]
FIRST = "master/0/w"


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    rows = {"master": [torch.arange(10.0)], "exp_avg": [torch.zeros(10)]}
    write_files(row_files(rows, PARTS, 0), tmp_path)
    write_files([block_file([{"a": torch.zeros(3)}], 0)], tmp_path)
    return tmp_path


def restore(checkpoint: Path) -> None:
    rows = {"master": [torch.zeros(10)], "exp_avg": [torch.zeros(10)]}
    read_rows(rows, PARTS, checkpoint)


Damage = Callable[[bytes], bytes]


def in_header(change: Callable[[dict[str, Any]], object]) -> Damage:
    """A change of a file's header, which may return another one."""

    def damage(content: bytes) -> bytes:
        size = int.from_bytes(content[:8], "little")
        header = json.loads(content[8 : 8 + size])
        text = json.dumps(change(header) or header).encode()
        return len(text).to_bytes(8, "little") + text + content[8 + size :]

    return damage


def renamed(name: str) -> Damage:
    return in_header(lambda header: {name if key == FIRST else key: header[key] for key in header})


def changed(**values: object) -> Damage:
    return in_header(lambda header: header[FIRST].update(values))


DAMAGES: list[Damage] = [
    *(lambda content: b"", lambda content: content[:5], lambda content: content[:-4]),
    *(lambda content: content + b"x", lambda content: DEEP, lambda content: b"\xff" * 100),
    *(lambda content: content[:-1] + b"\x01", in_header(lambda header: [1])),
    *(renamed("w"), renamed("master/x/w"), renamed("master/-1/w"), renamed("master/0/")),
    *(renamed(f"master/{10**22}/w"), changed(shape=[2, 3]), changed(shape=[]), changed(shape="x")),
    *(changed(shape=[5], data_offsets=[0, 20]), changed(dtype="F7"), changed(shape=[-6])),
]


@pytest.mark.parametrize("damage", DAMAGES, ids=range(len(DAMAGES)))
def test_a_rank_s_file(damage: Damage, checkpoint: Path) -> None:
    file = checkpoint / "rank-00000-00000.safetensors"
    file.write_bytes(damage(file.read_bytes()))
    refusal(lambda: restore(checkpoint), str(checkpoint))


def test_files_that_are_missing(checkpoint: Path) -> None:
    for file in checkpoint.glob("*.safetensors"):
        file.unlink()
    refusal(lambda: restore(checkpoint), str(checkpoint))
    refusal(lambda: read_weights(checkpoint, "master"), str(checkpoint))
    refusal(lambda: read_blocks(checkpoint, 0), str(checkpoint))


@pytest.mark.parametrize("name", [b"xxa", b"x/a"])
def test_blocks_of_another_name(name: bytes, checkpoint: Path) -> None:
    file = checkpoint / "blocks-00000.safetensors"
    file.write_bytes(file.read_bytes().replace(b"0/a", name))
    refusal(lambda: read_blocks(checkpoint, 0), str(checkpoint))


@settings(max_examples=percent(50), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(place=st.integers(0, 1000), byte=st.integers(1, 255))
def test_any_damaged_byte_of_a_checkpoint(place: int, byte: int, tmp_path: Path) -> None:
    """Each byte of the tensors is in a checksum, so no other values come back."""
    rows = {"master": [torch.arange(10.0)], "exp_avg": [torch.zeros(10)]}
    write_files(row_files(rows, PARTS, 0), tmp_path)
    file = tmp_path / "rank-00000-00000.safetensors"
    content = bytearray(file.read_bytes())
    content[place % len(content)] ^= byte
    file.write_bytes(content)
    back = {"master": [torch.zeros(10)], "exp_avg": [torch.ones(10)]}
    try:
        read_rows(back, PARTS, tmp_path)
    except ConfigError as error:
        assert str(tmp_path) in str(error)
    else:
        assert all(torch.equal(rows[kind][0], back[kind][0]) for kind in rows)


WRONG = [pair for key in STATE for pair in each(key, None, "x", [], True)]
MORE: list[tuple[str, object]] = [("best", "x"), ("sources", 5), ("rewards", []), ("unlearned", 1)]


@pytest.mark.parametrize(("key", "value"), [*WRONG, *MORE, ("new", 1)])
def test_a_field_of_a_state(key: str, value: object, tmp_path: Path) -> None:
    file = tmp_path / "state.json"
    file.write_text(json.dumps(STATE | {key: value}))
    refusal(lambda: RunState.load(file), "state.json", key)


@pytest.mark.parametrize("content", NO_OBJECTS, ids=range(len(NO_OBJECTS)))
def test_a_state_that_is_no_object(content: bytes, tmp_path: Path) -> None:
    file = tmp_path / "state.json"
    file.write_bytes(content)
    refusal(lambda: RunState.load(file), "state.json")


@pytest.fixture
def run(tmp_path: Path) -> Path:
    (tmp_path / "trajectories").mkdir()
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "train/loss": 1.0}\n')
    return tmp_path


LINES = [*(content + b"\n" for content in NO_OBJECTS if content), b'{"step": "x"}\n', b"{}\n"]


@pytest.mark.parametrize("line", LINES, ids=range(len(LINES)))
@pytest.mark.parametrize("name", ["metrics.jsonl", "ledger.jsonl"])
def test_a_line_of_a_run_s_rows(name: str, line: bytes, run: Path) -> None:
    (run / "ledger.jsonl").write_bytes(b"")
    (run / name).write_bytes(line)
    refused_command(["report", str(run)], f"{name}, line 1" if name[0] == "l" else "")


@pytest.mark.parametrize("content", [*NO_OBJECTS, b"PAR1" + bytes(100) + b"PAR1"])
def test_a_file_of_trajectories(content: bytes, run: Path) -> None:
    (run / "trajectories" / "step-000001.parquet").write_bytes(content)
    refused_command(["rollouts", str(run)], "step-000001.parquet")


@pytest.mark.parametrize("words", ["eval RUN", "export RUN --to OUT", "calibrate RUN"])
@pytest.mark.parametrize("content", [*NO_OBJECTS, b"a: [1\n", b"actor: 5\n", b"a: &a [*a]\n"])
def test_a_config_of_a_run(words: str, content: bytes, run: Path) -> None:
    (run / "config.yaml").write_bytes(content)
    given = words.replace("RUN", str(run)).replace("OUT", str(run / "out"))
    refused_command(given.split())
