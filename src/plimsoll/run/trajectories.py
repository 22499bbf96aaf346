"""Write and read trajectories as Parquet: one row per response, with all that a replay needs."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from io import BytesIO
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from plimsoll.errors import ConfigError, PlimsollError
from plimsoll.records import (
    ADVANTAGES,
    COLUMNS,
    SAMPLED,
    SAMPLER_LOGPROBS,
    WEIGHT_VERSIONS,
    Column,
    ExpertNumbers,
    Prompt,
    RewardPart,
    Trajectory,
    Turn,
    hold_once,
)
from plimsoll.run.directory import ROWS_OF_A_GROUP
from plimsoll.run.files import whole_file

_PARTS = pa.list_(
    pa.struct([("name", pa.string()), ("value", pa.float64()), ("weight", pa.float64())])
)
_TURNS = pa.list_(
    pa.struct(
        [
            *(("role", pa.string()), ("begin", pa.int64()), ("end", pa.int64())),
            *(("text", pa.string()), ("reward", pa.float64()), ("problem", pa.string())),
        ]
    )
)
_BRANCH = {
    **{"prompt_tokens": pa.list_(pa.int32()), "response": pa.string()},
    **{"tokens": pa.list_(pa.int32()), "loss_mask": pa.list_(pa.bool_())},
    **{column.name: pa.list_(pa.from_numpy_dtype(column.dtype)) for column in COLUMNS.values()},
    "finish_reason": pa.string(),
}
"""The types of what the file has of each branch; a column that a branch lacks is null.

They are those of the arrays: Arrow takes 80 times as long to convert one list of many.
"""
_ROUTING = "routing"
"""Additional column in runs that keep the engine's experts: NumPy's file of a branch's array."""
_BRANCHES = pa.list_(pa.struct([*_BRANCH.items(), ("turns", _TURNS), (_ROUTING, pa.binary())]))
_EPISODE = ["environment", "turns", "figures", "earlier"]
"""Additional columns in runs with environments."""
_VALUE = "reference_value"
"""Additional column in runs with references that are not text; its values are JSON text."""
_REWARD = "reward_"
"""The beginning of the names of additional columns: one for each part of the reward."""
_ROW = "row"
"""Column that older files lack: what else rewards read of a prompt's row, as JSON text."""
_WHOLE = [
    *("group", "prompt_index", "sample_index", "source", "columns", "prompt", "prompt_tokens"),
    *("response", "tokens", "loss_mask", "reference", "parts", "finish_reason"),
    *(SAMPLER_LOGPROBS.name, WEIGHT_VERSIONS.name),
]
"""The columns without which a trajectory cannot be read."""


@dataclass(frozen=True)
class StepDraw:
    """What a step drew beside its trajectories: with both, the step can be learned from again.

    Attributes:
        lineage: a fingerprint of the settings that decided what was sampled.
        prompts: the number of prompts that the step drew from the data.
        metrics: the metrics of the sampling.
        baselines: the reward of the greedy response to each group's prompt, if there are any.
        unlearned: see `RunState`.
        rewards: the running statistics of rewards after the draw.
    """

    lineage: str
    prompts: int
    metrics: Mapping[str, float]
    baselines: Mapping[int, float]
    unlearned: tuple[int, ...]
    rewards: Mapping[str, Mapping[str, float]]


_DRAW = b"plimsoll.draw"
"""The key of a `StepDraw`, as JSON, in the metadata of a Parquet file."""


def write_trajectories(
    path: Path,
    step: int,
    trajectories: Sequence[Trajectory],
    draw: StepDraw | None = None,
) -> None:
    """Write the trajectories of a step with their columns, before they are learned from.

    `parts` has all parts of the reward with their weights. Each part also has a column
    `reward_<name>` with its value before the weight, null for trajectories without it.
    `advantage_mean` is the mean over the tokens that are learned from, or null.

    Raises PlimsollError if the disk is full or not writable.
    """
    optional = _optional_columns(trajectories)
    schema = _table(step, (), optional).schema
    if draw is not None:
        schema = schema.with_metadata({_DRAW: json.dumps(asdict(draw))})
    leaves = dict(chain.from_iterable(_leaves(field.name, field.type) for field in schema))
    floats = [name for name, kind in leaves.items() if kind == pa.float32()]
    with (
        whole_file(path) as partial,
        pq.ParquetWriter(
            partial,
            schema,
            compression="zstd",
            # Log-probs are mostly distinct: a dictionary of them is larger than they are.
            use_dictionary=[name for name in leaves if name not in floats],
            column_encoding=dict.fromkeys(floats, "BYTE_STREAM_SPLIT"),
        ) as file,
    ):
        for start in range(0, max(1, len(trajectories)), ROWS_OF_A_GROUP):
            rows = trajectories[start : start + ROWS_OF_A_GROUP]
            file.write_table(_table(step, rows, optional))


def _leaves(name: str, kind: pa.DataType) -> Iterator[tuple[str, pa.DataType]]:
    """Yield the names that Parquet has for the values of a column, with their types."""
    if pa.types.is_list(kind):
        yield from _leaves(f"{name}.list.element", kind.value_type)
    elif pa.types.is_struct(kind):
        for field in kind:
            yield from _leaves(f"{name}.{field.name}", field.type)
    else:
        yield name, kind


def _optional_columns(ts: Sequence[Trajectory]) -> list[str]:
    """Return the names of the columns that depend on what a step's trajectories are."""
    rewards = dict.fromkeys(f"{_REWARD}{part.name}" for t in ts for part in t.rewards)
    others = {
        _VALUE: any(t.prompt.reference_value is not None for t in ts),
        "turns": any(t.turns for t in ts),  # and with them the others of episodes
        "earlier": any(t.earlier for t in ts),
        _ROUTING: any(t.routing is not None for t in ts),
    }
    return [*rewards, *(name for name, is_there in others.items() if is_there)]


def _table(step: int, ts: Sequence[Trajectory], optional: Sequence[str]) -> pa.Table:
    prompts, last = [t.prompt for t in ts], [*map(_branch, ts)]
    columns = {
        "step": pa.array([step] * len(ts), pa.int64()),
        "group": pa.array([t.group for t in ts], pa.int64()),
        "prompt_index": pa.array([p.index for p in prompts], pa.int64()),
        "sample_index": pa.array([t.sample_index for t in ts], pa.int64()),
        "source": pa.array([p.source for p in prompts], pa.string()),
        "columns": pa.array([json.dumps(dict(p.columns)) for p in prompts], pa.string()),
        "prompt": pa.array([p.text for p in prompts], pa.string()),
        _ROW: pa.array(map(_row_text, prompts), pa.string()),
        **{name: pa.array([b.get(name) for b in last], of) for name, of in _BRANCH.items()},
        "reference": pa.array([p.reference for p in prompts], pa.string()),
        "reward": pa.array([t.reward for t in ts], pa.float64()),
        **_reward_columns(ts, optional),
        "parts": pa.array([[asdict(part) for part in t.rewards] for t in ts], _PARTS),
        "advantage_mean": pa.array(map(_mean_advantage, ts), pa.float64()),
        # The version of the weights that began each response; null without tokens.
        "weight_version": pa.array([next(iter(t.weight_versions), None) for t in ts], pa.int64()),
    }
    if _VALUE in optional:
        given = [p.reference_value for p in prompts]
        texts = [None if value is None else json.dumps(value) for value in given]
        columns[_VALUE] = pa.array(texts, pa.string())
    if "turns" in optional:
        columns |= {
            "environment": pa.array([p.environment for p in prompts], pa.string()),
            "turns": pa.array([[asdict(turn) for turn in t.turns] for t in ts], _TURNS),
            "figures": pa.array([json.dumps(dict(t.figures)) for t in ts], pa.string()),
        }
    if _ROUTING in optional:
        columns[_ROUTING] = pa.array([branch[_ROUTING] for branch in last], pa.binary())
    if "earlier" in optional:
        columns["earlier"] = pa.array([[*map(_branch, t.earlier)] for t in ts], _BRANCHES)
    return pa.table(columns)


def _row_text(prompt: Prompt) -> str | None:
    """Return what else rewards read of a prompt's row, as JSON text; None if there is nothing."""
    messages = [dict(message) for message in prompt.messages]
    row = {"named": dict(prompt.named), "messages": messages, "is_text": prompt.is_text}
    return json.dumps(row) if any(row.values()) else None


def _row_values(text: str | None) -> dict[str, Any]:
    """Return the values that `_row_text` wrote, by the names of `Prompt`."""
    if text is None:
        return {}
    row = json.loads(text)
    return {"named": row["named"], "messages": (*row["messages"],), "is_text": row["is_text"]}


def _branch(t: Trajectory) -> dict[str, Any]:
    """Return the values of a branch by their names in the file."""
    return {
        "prompt_tokens": t.prompt.tokens,
        "response": t.response_text,
        "tokens": t.response_tokens,
        "loss_mask": np.ascontiguousarray(t.loss_mask),
        "finish_reason": t.finish_reason,
        _ROUTING: _to_file(t.routing),
        **{column.name: np.ascontiguousarray(array) for column, array in t.columns.items()},
        "turns": [asdict(turn) for turn in t.turns],
    }


def _to_file(array: ExpertNumbers | None) -> bytes | None:
    """Return the bytes of NumPy's file of an array, which `_from_file` reads."""
    if array is None:
        return None
    file = BytesIO()
    np.save(file, array, allow_pickle=False)
    return file.getvalue()


def _from_file(content: bytes | None) -> ExpertNumbers | None:
    return None if content is None else np.load(BytesIO(content), allow_pickle=False)


def _mean_advantage(trajectory: Trajectory) -> float | None:
    """Return the mean at learned tokens; 0 without such tokens, None without advantages."""
    advantages = trajectory.columns.get(ADVANTAGES)
    if advantages is None:
        return None
    learned = advantages[trajectory.loss_mask]
    return float(learned.mean()) if len(learned) else 0.0


def _reward_columns(ts: Sequence[Trajectory], names: Sequence[str]) -> dict[str, pa.Array]:
    """Return those of the columns that are of a part of the reward."""
    by_trajectory = [{f"{_REWARD}{part.name}": part.value for part in t.rewards} for t in ts]
    return {
        name: pa.array([values.get(name) for values in by_trajectory], pa.float64())
        for name in names
        if name.startswith(_REWARD)
    }


def to_bytes(trajectories: Sequence[Trajectory]) -> bytes:
    """Return trajectories as an Arrow stream, which `from_bytes` reads."""
    table = _table(0, trajectories, _optional_columns(trajectories))
    sink = pa.BufferOutputStream()
    options = pa.ipc.IpcWriteOptions(compression="zstd")
    with pa.ipc.new_stream(sink, table.schema, options=options) as writer:
        writer.write_table(table)
    return bytes(sink.getvalue())


def from_bytes(content: bytes) -> list[Trajectory]:
    """Return the trajectories of an Arrow stream."""
    with pa.ipc.open_stream(content) as reader:
        return [_trajectory(row) for row in reader.read_all().to_pylist()]


def read_draw(path: Path) -> StepDraw | None:
    """Return what the step of a file drew, or None if the file does not hold it or is damaged."""
    try:
        text = (pq.read_schema(path).metadata or {}).get(_DRAW)
    except (OSError, pa.ArrowException):
        return None
    if text is None:
        return None
    draw = StepDraw(**json.loads(text))
    baselines = {int(group): reward for group, reward in draw.baselines.items()}
    return replace(draw, baselines=baselines, unlearned=tuple(draw.unlearned))


def read_trajectories(path: Path, columns: Collection[Column] = SAMPLED) -> list[Trajectory]:
    """Return the trajectories of a file with those of these columns that it holds.

    Raises ConfigError if it lacks what every trajectory has, or is damaged.
    """
    with _explaining_damage(path):
        return _read_trajectories(path, columns)


@contextmanager
def _explaining_damage(path: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, pa.ArrowException, ValueError, TypeError, LookupError) as error:
        raise ConfigError(
            f"{path} cannot be read as trajectories: {error}. Copy the file again, or remove it."
        ) from error


def _read_trajectories(path: Path, columns: Collection[Column]) -> list[Trajectory]:
    names = set(pq.read_schema(path).names)
    lacking = sorted(set(_WHOLE) - names)
    if lacking:
        raise ConfigError(
            f"{path} holds no whole trajectories: it has no {', '.join(lacking)}. An older version "
            "wrote it, which did not keep them. Give the run.directory of a newer run."
        )
    wanted = (_VALUE, _ROW, *_EPISODE, _ROUTING, *(column.name for column in columns))
    read = dict.fromkeys([*_WHOLE, *(name for name in wanted if name in names)])
    # Batch by batch: as Python's object a number takes some 36 bytes.
    batches = read_bounded(path, [*read]).to_batches()
    return [_trajectory(row, columns) for batch in batches for row in batch.to_pylist()]


def _trajectory(row: Mapping[str, Any], columns: Collection[Column] = SAMPLED) -> Trajectory:
    branch_row = {**row, "earlier": (), "parts": ()}
    return Trajectory(
        prompt=Prompt(
            row["prompt_index"],
            np.array(row["prompt_tokens"], np.int32),
            row["prompt"],
            row["reference"],
            row["source"],
            json.loads(row["columns"]),
            environment=row.get("environment", ""),
            reference_value=json.loads(row.get(_VALUE) or "null"),
            **_row_values(row.get(_ROW)),
        ),
        group=row["group"],
        sample_index=row["sample_index"],
        response_tokens=np.array(row["tokens"], np.int32),
        loss_mask=hold_once(np.array(row["loss_mask"], np.bool_)),
        columns={
            column: hold_once(np.array(row[column.name], column.dtype))
            for column in columns
            if row.get(column.name) is not None
        },
        response_text=row["response"],
        finish_reason=row["finish_reason"],
        rewards=tuple(RewardPart(**part) for part in row["parts"]),
        turns=tuple(Turn(**turn) for turn in row.get("turns", ())),
        figures=json.loads(row.get("figures", "{}")),
        routing=_from_file(row.get(_ROUTING)),
        earlier=tuple(
            _trajectory({**branch_row, **branch}, columns) for branch in row.get("earlier") or ()
        ),
    )


_LEAST_ROOM, _MOST_TIMES = 2**28, 100
"""Bytes that the rows of any file may take, and how many times its own bytes they may take more."""


def read_bounded(path: Path, columns: Sequence[str] | None = None) -> pa.Table:
    """Return the rows of a Parquet file, which somebody else may have written.

    Raises PlimsollError if they take far more memory than the file.
    """
    batches = [*iter_bounded(path, columns)]
    return pa.Table.from_batches(batches) if batches else pq.read_table(path, columns=columns)


def iter_bounded(
    path: Path, columns: Sequence[str] | None, row_groups: Sequence[int] | None = None
) -> Iterator[pa.RecordBatch]:
    """Yield the rows of a Parquet file, of all its row groups or of some.

    Raises PlimsollError if they take far more memory than the file: one value, written once, may
    stand in any number of rows.
    """
    most, held = _LEAST_ROOM + _MOST_TIMES * path.stat().st_size, 0
    with pq.ParquetFile(path) as file:
        for batch in file.iter_batches(batch_size=64, columns=columns, row_groups=row_groups):
            held += batch.nbytes
            if held > most:
                raise PlimsollError(
                    f"{path} has {path.stat().st_size:,} bytes, and its rows take more than "
                    f"{most:,}. No run writes such a file; remove it."
                )
            yield batch


def row_groups_of(path: Path, column: str, value: int) -> list[int]:
    """Return the row groups of a Parquet file that may have a value in a column of numbers."""
    metadata = pq.read_metadata(path)
    paths = [metadata.schema.column(place).path for place in range(metadata.num_columns)]

    def may_have(row_group: int) -> bool:
        known = metadata.row_group(row_group).column(paths.index(column)).statistics
        is_known = known is not None and known.has_min_max and isinstance(known.min, int)
        return not is_known or known.min <= value <= known.max

    groups = range(metadata.num_row_groups)
    return [*filter(may_have, groups)] if column in paths else [*groups]
