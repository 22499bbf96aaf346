"""Find the numbers of a step that are not finite, before anything learns from them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from plimsoll.records import SAMPLED, BatchColumns, Column, Trajectory
from plimsoll.rl.batch import Batch
from plimsoll.run.health import BadNumbers
from plimsoll.run.numbers import first_of

_SHOWN = 5


def check_rewards(trajectories: Sequence[Trajectory]) -> None:
    """Raise BadNumbers if a reward, or a log-prob of the sampler, is not finite."""
    names = dict.fromkeys(part.name for t in trajectories for part in t.rewards)
    arrays: dict[str, Iterable[NDArray[Any]]] = {
        f"the reward {name}": [
            np.array([part.value for part in t.rewards if part.name == name]) for t in trajectories
        ]
        for name in names
    }
    _check(arrays | {c.what: _of_episodes(trajectories, c) for c in SAMPLED}, trajectories)


def _of_episodes(trajectories: Sequence[Trajectory], column: Column) -> Iterator[NDArray[Any]]:
    """Yield the numbers of each episode in a column; an episode without the column has none."""
    for t in trajectories:
        yield np.concatenate([b.columns.get(column, np.zeros(0)) for b in t.branches])


def check_columns(batch: Batch, columns: BatchColumns) -> None:
    """Raise BadNumbers if a number in a batch's columns is not finite."""
    _check({column.what: entries for column, entries in columns.items()}, batch.trajectories)


def _check(
    arrays: Mapping[str, Iterable[NDArray[Any]]], trajectories: Sequence[Trajectory]
) -> None:
    """Raise BadNumbers if there are numbers that are not finite; `arrays` has them by name."""
    figures = [text for name in arrays for text in _bad(name, arrays[name], trajectories)]
    if figures:
        raise BadNumbers(figures)


def _bad(
    name: str, arrays: Iterable[NDArray[Any]], trajectories: Sequence[Trajectory]
) -> Iterator[str]:
    """Yield a text if arrays have numbers that are not finite; it names their groups and rows."""
    pairs = zip(arrays, trajectories, strict=True)
    groups = sorted(
        {(t.group, t.prompt.index) for array, t in pairs if not np.isfinite(array).all()}
    )
    if groups:
        shown = first_of([f"{group} (row {row})" for group, row in groups], _SHOWN)
        yield f"{name} of group {shown}"
