"""Find the numbers of a step that are not finite, before anything learns from them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from plimsoll.records import Floats, Trajectory
from plimsoll.rl.batch import Batch, Learnables, Scores
from plimsoll.run.health import BadNumbers
from plimsoll.run.numbers import first_of

_SHOWN = 5


def check_rewards(trajectories: Sequence[Trajectory]) -> None:
    """Raise BadNumbers if a reward, or a log-prob of the sampler, is not finite."""
    names = dict.fromkeys(part.name for t in trajectories for part in t.rewards)
    rewards = {
        f"the reward {name}": [
            np.array([part.value for part in t.rewards if part.name == name]) for t in trajectories
        ]
        for name in names
    }
    rewards["the rewards of tokens"] = [
        np.zeros(0) if t.token_rewards is None else t.token_rewards for t in trajectories
    ]
    rewards["the sampler's log-probs"] = [
        np.concatenate([branch.sampler_logprobs for branch in t.branches]) for t in trajectories
    ]
    _raise(
        figure for name, arrays in rewards.items() for figure in _bad(name, arrays, trajectories)
    )


def check_scores(batch: Batch, scores: Scores) -> None:
    """Raise BadNumbers if a log-prob or a value that the run's models gave is not finite."""
    columns = {
        "the actor's log-probs": scores.old_L,
        "the reference's log-probs": scores.reference_L,
        "the critic's values": scores.values_L,
        "the teacher's log-probs": scores.teacher_L,
    }
    _raise(_bad_columns(batch, columns))


def check_learnables(batch: Batch, learnables: Learnables) -> None:
    """Raise BadNumbers if an advantage or a return is not finite."""
    columns = {"the advantages": learnables.advantages_L, "the returns": learnables.returns_L}
    _raise(_bad_columns(batch, columns))


def _bad_columns(batch: Batch, columns: dict[str, Floats | None]) -> Iterator[str]:
    for name, column_L in columns.items():
        if column_L is not None:
            yield from _bad(name, batch.layout.by_trajectory(column_L), batch.trajectories)


def _bad(name: str, arrays: Sequence[Floats], trajectories: Sequence[Trajectory]) -> Iterator[str]:
    """Yield a text if arrays have numbers that are not finite; it names their groups and rows."""
    pairs = zip(arrays, trajectories, strict=True)
    groups = sorted(
        {(t.group, t.prompt.index) for array, t in pairs if not np.isfinite(array).all()}
    )
    if groups:
        shown = first_of([f"{group} (row {row})" for group, row in groups], _SHOWN)
        yield f"{name} of group {shown}"


def _raise(figures: Iterator[str]) -> None:
    if found := list(figures):
        raise BadNumbers(found)
