"""`plimsoll rollouts RUN`: what was sampled in a step, group by group; and what became of a prompt
from one step to another.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import pyarrow as pa
import pyarrow.parquet as pq
from rich.console import Console

from plimsoll.commands.rollouts_mask import mark_learned_tokens
from plimsoll.commands.rollouts_text import (
    StepGroup,
    compared_columns,
    compared_text,
    group_columns,
    group_text,
    overview_text,
)
from plimsoll.errors import ConfigError
from plimsoll.run.counting import counted
from plimsoll.run.directory import existing_run
from plimsoll.run.responses import ResponseGroup, read_groups


@dataclass(frozen=True)
class RolloutQuery:
    """What a person asks for.

    step: None for the last. group: its number in the step. prompt: a text that it holds. order: by
    the mean reward. diff: another step. count: how many groups are shown in full. mask: by their
    tokens, with which of them are learned from.
    """

    step: int | None = None
    group: int | None = None
    prompt: str | None = None
    order: Literal["worst", "best"] | None = None
    diff: int | None = None
    count: int = 1
    mask: bool = False


def show_rollouts(path: Path, wanted: RolloutQuery, terminal: Console | None) -> str:
    """What is asked for, as text. path: a run.directory, or a file of trajectories. terminal: to
    put responses side by side on; None: one under another.

    Raises ConfigError where there is no such run, step, group or prompt; the message says which
    there are.
    """
    if wanted.count < 1:
        raise ConfigError(f"--count {wanted.count} shows nothing. Give 1 or more.")
    steps = _steps(path)
    step = max(steps) if wanted.step is None else wanted.step
    groups = _chosen(_read(path, steps, step), step, wanted)
    if wanted.diff is not None:
        pairs = _pairs(path, steps, step, groups, wanted)
        if wanted.mask:
            pairs = [(_masked(steps, a), _masked(steps, b)) for a, b in pairs]
        if terminal is None:
            return "\n\n".join(compared_text(*pair) for pair in pairs)
        return "\n\n".join(compared_columns(*pair, terminal) for pair in pairs)
    if len(groups) > wanted.count:
        return overview_text(step, groups, None if terminal is None else terminal.width)
    if wanted.mask:
        groups = mark_learned_tokens(groups, steps[step])
    if terminal is None:
        return "\n\n".join(group_text(step, group) for group in groups)
    return "\n\n".join(group_columns(step, group, terminal) for group in groups)


def _steps(path: Path) -> dict[int, Path]:
    """The steps that have trajectories, in their order, with their files."""
    if path.is_file():
        return {_step_of(path): path}
    found = existing_run(path).trajectories()
    if not found:
        raise ConfigError(
            f"{path} holds no trajectories. Runs of reinforcement learning write them "
            f"(run.keep_trajectories), from their first step on. Give the run.directory of one."
        )
    return found


def _step_of(path: Path) -> int:
    try:
        step: int = pq.read_table(path, columns=["step"])["step"][0].as_py()
    except (pa.ArrowException, IndexError, KeyError) as error:
        raise ConfigError(
            f"{path} holds no trajectories: {type(error).__name__}: {error}. Give a run.directory, "
            "or a Parquet file of its folder trajectories."
        ) from error
    return step


def _read(path: Path, steps: Mapping[int, Path], step: int) -> list[ResponseGroup]:
    if step not in steps:
        raise ConfigError(
            f"{path} has no trajectories of step {step}. Give one of the steps {_spans(steps)}."
        )
    return read_groups(steps[step])


def _spans(numbers: Iterable[int]) -> str:
    """Such as `1 to 4, 7`."""
    spans: list[list[int]] = []
    for number in sorted(numbers):
        if spans and number == spans[-1][-1] + 1:
            spans[-1][1:] = [number]
        else:
            spans.append([number])
    return ", ".join(" to ".join(map(str, span)) for span in spans)


def _chosen(
    groups: Sequence[ResponseGroup], step: int, wanted: RolloutQuery
) -> list[ResponseGroup]:
    found = list(groups)
    if wanted.group is not None:
        found = [group for group in found if group.number == wanted.group]
        if not found:
            numbers = _spans(group.number for group in groups)
            raise ConfigError(
                f"Step {step} has no group {wanted.group}. Give one of the groups {numbers}."
            )
    if wanted.prompt is not None:
        found = [group for group in found if wanted.prompt in group.prompt]
        if not found:
            raise ConfigError(
                f"None of the {counted(len(groups), 'prompt')} of step {step} has "
                f"{wanted.prompt!r} in it. Give a text as it stands in a prompt, or another --step."
            )
    if wanted.order is not None:
        found.sort(key=lambda group: group.reward, reverse=wanted.order == "best")
        found = found[: wanted.count]
    return found


GroupPair = tuple[StepGroup, StepGroup]
"""A prompt's groups in an earlier and a later step."""


def _masked(steps: Mapping[int, Path], placed: StepGroup) -> StepGroup:
    step, group = placed
    [found] = mark_learned_tokens([group], steps[step])
    return step, found


def _pairs(
    path: Path,
    steps: Mapping[int, Path],
    step: int,
    groups: Sequence[ResponseGroup],
    wanted: RolloutQuery,
) -> list[GroupPair]:
    """Of prompts that both steps have, those whose mean reward changed most."""
    assert wanted.diff is not None
    others = {_prompt(group): group for group in _read(path, steps, wanted.diff)}
    pairs = [(group, others[_prompt(group)]) for group in groups if _prompt(group) in others]
    if not pairs:
        raise ConfigError(_no_pair(steps, step, groups, wanted.diff))
    pairs.sort(key=lambda pair: -abs(pair[0].reward - pair[1].reward))
    placed = [((step, own), (wanted.diff, other)) for own, other in pairs[: wanted.count]]
    return [(b, a) if b[0] < a[0] else (a, b) for a, b in placed]


def _prompt(group: ResponseGroup) -> int:
    """What is the same for a prompt in all steps."""
    return group.responses[0].prompt_index


def _no_pair(
    steps: Mapping[int, Path], step: int, groups: Sequence[ResponseGroup], other: int
) -> str:
    indices = set(map(_prompt, groups))
    shared = [
        place
        for place, path in steps.items()
        if place != step
        and not indices.isdisjoint(pq.read_table(path, columns=["prompt_index"])[0].to_pylist())
    ]
    others = f"Steps that have: {_spans(shared)}" if shared else "No other step has one, either"
    return f"Step {other} has no prompt that step {step} has and that is asked for. {others}."
