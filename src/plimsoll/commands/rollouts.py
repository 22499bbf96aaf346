"""`plimsoll rollouts RUN`: show the groups sampled in a step, or a prompt's groups in two steps."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import pyarrow as pa
import pyarrow.parquet as pq

from plimsoll.commands.rollouts_text import (
    StepGroup,
    group_text,
    mark_learned_tokens,
    overview_text,
    pair_text,
    sequences_text,
)
from plimsoll.errors import ConfigError
from plimsoll.run.directory import existing_run
from plimsoll.run.numbers import plural, rank
from plimsoll.run.responses import ResponseGroup, read_groups
from plimsoll.run.trajectories import read_bounded


@dataclass(frozen=True)
class RolloutQuery:
    """The groups to show, and how to show them."""

    step: int | None = None
    """The step; None for the last step."""
    group: int | None = None
    """Number of a group in the step."""
    prompt: str | None = None
    """Text that the prompt contains."""
    order: Literal["worst", "best"] | None = None
    """Order of groups by mean reward; None for the order of their numbers."""
    diff: int | None = None
    """A second step, to compare with."""
    count: int = 1
    """Number of groups to show in full."""
    mask: bool = False
    """Whether to show all tokens, and mark the tokens that are learned from."""
    trusted: bool = False
    """Whether the run's config may name code, which its tokenizer then runs."""
    bad: bool = False
    """Whether to show what steps with numbers that are not finite would have learned from."""


def show_rollouts(path: Path, query: RolloutQuery, width: int | None) -> str:
    """Return a text that shows the groups of a query: in full, or a line each if there are many.

    `path` is a run.directory or a trajectory file; lines of an overview have `width` characters.

    Raises ConfigError if there is no such run, step, group or prompt.
    """
    if query.count < 1:
        raise ConfigError(f"--count {query.count} shows nothing. Give 1 or more.")
    steps = _bad_steps(path) if query.bad else _steps(path)
    step = max(steps) if query.step is None else query.step
    if query.bad and step in steps and "group" not in pq.read_schema(steps[step]).names:
        return sequences_text(steps[step], trusted=query.trusted)
    groups = _choose_groups(_read(path, steps, step), step, query)
    if query.diff is not None:
        pairs = _pairs(path, steps, step, groups, query)
        if query.mask:
            mark = partial(_mark_tokens, steps, query)
            pairs = [(mark(earlier), mark(later)) for earlier, later in pairs]
        return "\n\n".join(pair_text(*pair) for pair in pairs)
    if len(groups) > query.count:
        return overview_text(step, groups, width)
    if query.mask:
        groups = mark_learned_tokens(groups, steps[step], trusted=query.trusted)
    return "\n\n".join(group_text(step, group) for group in groups)


def _steps(path: Path) -> dict[int, Path]:
    """Return the paths of trajectory files by step, in the order of steps."""
    if path.is_file():
        return {_step_of(path): path}
    files = existing_run(path).trajectories()
    if not files:
        raise ConfigError(
            f"{path} holds no trajectories. Runs of reinforcement learning write them "
            f"(run.keep_trajectories), from their first step on. Give the run.directory of one."
        )
    return files


def _bad_steps(path: Path) -> dict[int, Path]:
    """Return the paths of what bad steps would have learned from, by step."""
    files = existing_run(path).bad_steps()
    if not files:
        raise ConfigError(
            f"{path} has no bad step: all numbers that it learned from were finite. Leave out "
            "--bad to see what was sampled."
        )
    return files


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
    try:
        return read_groups(steps[step])
    except (OSError, pa.ArrowException, ValueError, TypeError, LookupError) as error:
        raise ConfigError(
            f"{steps[step]} cannot be read as trajectories: {error}. Remove it, or give a --step."
        ) from error


def _spans(numbers: Iterable[int]) -> str:
    """Return numbers as text such as `1 to 4, 7`."""
    spans: list[list[int]] = []
    for number in sorted(numbers):
        if spans and number == spans[-1][-1] + 1:
            spans[-1][1:] = [number]
        else:
            spans.append([number])
    return ", ".join(" to ".join(map(str, span)) for span in spans)


def _choose_groups(
    groups: Sequence[ResponseGroup], step: int, query: RolloutQuery
) -> list[ResponseGroup]:
    chosen = list(groups)
    if query.group is not None:
        chosen = [group for group in chosen if group.number == query.group]
        if not chosen:
            numbers = _spans(group.number for group in groups)
            raise ConfigError(
                f"Step {step} has no group {query.group}. Give one of the groups {numbers}."
            )
    if query.prompt is not None:
        chosen = [group for group in chosen if query.prompt in group.prompt]
        if not chosen:
            raise ConfigError(
                f"None of the {plural(len(groups), 'prompt')} of step {step} has "
                f"{query.prompt!r} in it. Give a text as it stands in a prompt, or another --step."
            )
    if query.order is not None:
        chosen.sort(key=lambda group: rank(group.reward), reverse=query.order == "best")
        chosen = chosen[: query.count]
    return chosen


GroupPair = tuple[StepGroup, StepGroup]
"""A prompt's group in an earlier step, and its group in a later step."""


def _mark_tokens(steps: Mapping[int, Path], query: RolloutQuery, placed: StepGroup) -> StepGroup:
    step, group = placed
    [marked] = mark_learned_tokens([group], steps[step], trusted=query.trusted)
    return step, marked


def _pairs(
    path: Path,
    steps: Mapping[int, Path],
    step: int,
    groups: Sequence[ResponseGroup],
    query: RolloutQuery,
) -> list[GroupPair]:
    """Return the pairs of groups whose mean reward differs most between two steps.

    There are at most `query.count`. Each pair has the same prompt in both steps.
    """
    assert query.diff is not None
    by_prompt = {_prompt(group): group for group in _read(path, steps, query.diff)}
    pairs = [(group, by_prompt[_prompt(group)]) for group in groups if _prompt(group) in by_prompt]
    if not pairs:
        raise ConfigError(_no_pair(steps, step, groups, query.diff))
    pairs.sort(key=lambda pair: -rank(abs(pair[0].reward - pair[1].reward)))
    placed = [((step, group), (query.diff, before)) for group, before in pairs[: query.count]]
    return [(b, a) if b[0] < a[0] else (a, b) for a, b in placed]


def _prompt(group: ResponseGroup) -> int:
    """Return the number that identifies a prompt in all steps."""
    return group.responses[0].prompt_index


def _no_pair(
    steps: Mapping[int, Path], step: int, groups: Sequence[ResponseGroup], other_step: int
) -> str:
    indices = set(map(_prompt, groups))
    shared = [
        place
        for place, path in steps.items()
        if place != step
        and not indices.isdisjoint(read_bounded(path, ["prompt_index"])[0].to_pylist())
    ]
    where = f"Steps that have some: {_spans(shared)}" if shared else "No other step has any"
    return f"Step {other_step} has none of the requested prompts of step {step}. {where}."
