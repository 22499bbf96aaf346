"""Trajectories as Parquet: one row per sampled response; written, and some read for people."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from plimsoll.records import Trajectory
from plimsoll.run.files import whole_file


def write_trajectories(
    path: Path,
    step: int,
    trajectories: Sequence[Trajectory],
    advantages_mean: Sequence[float] | None,
) -> None:
    """Write the trajectories of a step, in their order.

    Each reward part has a column `reward_<name>` with its value before the weight; all
    trajectories have the same parts. `advantage_mean` is null where there is none.
    """
    table = _table(step, trajectories, advantages_mean)
    with whole_file(path) as partial:
        pq.write_table(table, partial, compression="zstd")


def _table(
    step: int, trajectories: Sequence[Trajectory], advantages_mean: Sequence[float] | None
) -> pa.Table:
    ts = trajectories
    advantages = [None] * len(ts) if advantages_mean is None else list(advantages_mean)
    assert len(advantages) == len(ts), f"{len(advantages)} advantages, {len(ts)} trajectories"
    columns = {
        "step": pa.array([step] * len(ts), pa.int64()),
        "prompt_index": pa.array([t.prompt.index for t in ts], pa.int64()),
        "sample_index": pa.array([t.sample_index for t in ts], pa.int64()),
        "prompt": pa.array([t.prompt.text for t in ts], pa.string()),
        "response": pa.array([t.response_text for t in ts], pa.string()),
        "reference": pa.array([t.prompt.reference for t in ts], pa.string()),
        "reward": pa.array([t.reward for t in ts], pa.float64()),
        **_reward_columns(ts),
        "advantage_mean": pa.array(advantages, pa.float64()),
        "finish_reason": pa.array([t.finish_reason for t in ts], pa.string()),
        "weight_version": pa.array([_version(t) for t in ts], pa.int64()),
        "tokens": pa.array([t.response_tokens for t in ts], pa.list_(pa.int64())),
        "sampler_logprobs": pa.array([t.sampler_logprobs for t in ts], pa.list_(pa.float32())),
    }
    return pa.table(columns)


def _version(trajectory: Trajectory) -> int | None:
    """The one that began it; null of one without tokens."""
    versions = trajectory.weight_versions
    return int(versions[0]) if len(versions) else None


def _reward_columns(trajectories: Sequence[Trajectory]) -> dict[str, pa.Array]:
    if not trajectories:
        return {}
    names = [part.name for part in trajectories[0].rewards]
    for trajectory in trajectories:
        found = [part.name for part in trajectory.rewards]
        assert found == names, f"reward parts {found} beside {names}"
    return {
        f"reward_{name}": pa.array([t.rewards[i].value for t in trajectories], pa.float64())
        for i, name in enumerate(names)
    }


@dataclass(frozen=True)
class SampledResponse:
    """A row as a person reads it. parts: of the reward, before their weights."""

    prompt: str
    response: str
    reference: str | None
    reward: float
    parts: Mapping[str, float]
    cut_off: bool


def read_some(path: Path, count: int) -> list[SampledResponse]:
    """Of a step's trajectories so many, or all: the best first, the worst last, and between them
    others at even distances in that order."""
    names = pq.read_schema(path).names
    parts = [name for name in names if name.startswith("reward_")]
    columns = ["prompt", "response", "reference", "reward", "finish_reason", *parts]
    table = pq.read_table(path, columns=columns)
    order = pc.sort_indices(table, sort_keys=[("reward", "descending")]).to_pylist()
    last, shown = len(order) - 1, min(count, len(order))
    places = [order[round(i * last / max(shown - 1, 1))] for i in range(shown)]
    return [_sampled(row, parts) for row in table.take(places).to_pylist()]


def _sampled(row: Mapping[str, Any], parts: Sequence[str]) -> SampledResponse:
    return SampledResponse(
        prompt=row["prompt"],
        response=row["response"],
        reference=row["reference"],
        reward=row["reward"],
        parts={name.removeprefix("reward_"): row[name] for name in parts},
        cut_off=row["finish_reason"] == "length",
    )
