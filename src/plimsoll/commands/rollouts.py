"""`plimsoll rollouts RUN`: show the groups sampled in a step, or a prompt's groups in two steps.

With `--mask` all tokens are shown, and the tokens that are learned from are marked.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from pathlib import Path
from statistics import fmean
from textwrap import indent
from typing import TYPE_CHECKING, Any, Literal

import pyarrow as pa
import pyarrow.parquet as pq

from plimsoll.config.engine import ModelConfig
from plimsoll.config.load import read_tree_of, validate
from plimsoll.config.yaml_tree import Tree, value_at
from plimsoll.errors import ConfigError
from plimsoll.run.directory import RunDirectory, existing_run
from plimsoll.run.numbers import mean, plural, rank
from plimsoll.run.responses import (
    ResponseGroup,
    SampledResponse,
    excerpt,
    join_branches,
    read_groups,
)
from plimsoll.run.trajectories import read_bounded

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


_PLAIN_WIDTH = 100
_OVERVIEW = "{:>6} {:>10} {:>10} {:>10} {:>7} {:>8}  "
StepGroup = tuple[int, ResponseGroup]
"""A step and one of its groups."""


def overview_text(step: int, groups: Sequence[ResponseGroup], width: int | None) -> str:
    """Return an overview with a line for each group, cut to `width` characters (None: 100)."""
    head = _OVERVIEW.format("group", "reward", "lowest", "highest", "tokens", "cut off")
    room = max((_PLAIN_WIDTH if width is None else width) - len(head), 10)
    lines = []
    for group in groups:
        rewards = [f"{value:.4g}" for value in (group.reward, *_ends(group))]
        tokens = f"{fmean(r.tokens for r in group.responses):.0f}"
        cut = f"{sum(r.cut_off for r in group.responses)}/{len(group.responses)}"
        figures = _OVERVIEW.format(group.number, *rewards, tokens, cut)
        lines.append(figures + excerpt(group.prompt, room))
    responses = [r for group in groups for r in group.responses]
    equal = sum(group.spread == 0 for group in groups)
    about = (
        f"Step {step}: {plural(len(groups), 'group')}, {plural(len(responses), 'response')}, "
        f"mean reward {mean(r.reward for r in responses):.4g}. Groups whose rewards are all "
        f"equal: {equal}."
    )
    how = "--group G shows one in full; --worst, --best and --diff STEP choose one."
    return "\n".join([about, "", head + "prompt", *lines, "", how])


def _ends(group: ResponseGroup) -> tuple[float, float]:
    """Return the lowest and the highest reward of a group."""
    return group.responses[-1].reward, group.responses[0].reward


def group_text(step: int, group: ResponseGroup) -> str:
    """Return a text with all responses of a group."""
    return "\n".join([_title(step, group), *_prompt_lines(group), "", *_answers(group)])


def pair_text(earlier: StepGroup, later: StepGroup) -> str:
    """Return a text with all responses to a prompt in two steps, the best responses first."""
    before, after = earlier[1].reward, later[1].reward
    change = f"Mean reward {before:.4g} in step {earlier[0]}, {after:.4g} in step {later[0]} "
    lines = [f"{change}({after - before:+.4g})", *_prompt_lines(later[1]), ""]
    for step, group in (earlier, later):
        lines += [_title(step, group), "", *_answers(group)]
    return "\n".join(lines)


def _answers(group: ResponseGroup) -> list[str]:
    """Return a text for each response: its index and figures, then its indented text."""
    return [
        f"[{r.sample_index}] {_figures(r)}\n{indent(r.response, '    ')}\n" for r in group.responses
    ]


def _title(step: int, group: ResponseGroup) -> str:
    count = plural(len(group.responses), "response")
    lowest, highest = _ends(group)
    spread = f" ({lowest:.4g} to {highest:.4g})" if group.spread else ""
    return f"Step {step}, group {group.number}: {count}, mean reward {group.reward:.4g}{spread}"


def _prompt_lines(group: ResponseGroup) -> list[str]:
    """Return lines with the prompt, its index, its source and its reference."""
    first = group.responses[0]
    lines = [f"Prompt {first.prompt_index}{f' of {first.source}' if first.source else ''}"]
    lines.append(indent(first.prompt, "    "))
    if first.reference is not None:
        lines.append(f"Reference: {first.reference}")
    return lines


def _figures(r: SampledResponse) -> str:
    """Return the figures of a response, such as `reward 1`, `57 tokens`, `version 11`."""
    parts = ", ".join(f"{name} {value:.4g}" for name, value in r.parts.items())
    return " | ".join(
        [
            f"reward {r.reward:.4g}",
            *([parts] if len(r.parts) > 1 else []),
            *([f"advantage {r.advantage:+.3g}"] if r.advantage is not None else []),
            plural(r.tokens, "token") + (", cut off" if r.cut_off else ""),
            *([f"version {r.version}"] if r.version is not None else []),
        ]
    )


_TOKENS = ("group", "sample_index", "prompt_tokens", "tokens", "loss_mask")


def mark_learned_tokens(
    groups: Sequence[ResponseGroup], file: Path, *, trusted: bool = False
) -> list[ResponseGroup]:
    """Return a copy of each group in which every response shows all its tokens.

    The tokens include special tokens and the prompt's. Lines of tokens that are learned from begin
    with `+`. `file` is the groups' trajectory file, within its run.directory. `trusted` says
    whether the run's config may name code.

    Raises ConfigError if the run's config is not found or names code, or if an older version wrote
    the file without masks.
    """
    mark = partial(_marked_text, _tokenizer(file, trusted))
    try:
        earlier = {"earlier"} & {*pq.read_schema(file).names}
        rows = read_bounded(file, [*_TOKENS, *earlier]).to_pylist()
    except pa.ArrowException as error:
        raise ConfigError(
            f"{file} has not the columns {', '.join(_TOKENS)}. An older version wrote it; leave "
            "--mask out."
        ) from error
    by_response = {(row["group"], row["sample_index"]): row for row in rows}

    def with_marks(response: SampledResponse) -> SampledResponse:
        row = by_response[response.group, response.sample_index]
        return replace(response, response=join_branches(row, mark))

    return [ResponseGroup([*map(with_marks, group.responses)]) for group in groups]


def sequences_text(file: Path, *, trusted: bool = False) -> str:
    """Return the text of the sequences that a bad step of a job on rows would have learned from.

    Learned tokens are marked with `+`. Raises ConfigError as `mark_learned_tokens`.
    """
    tokenizer, lines = _tokenizer(file, trusted), list[str]()
    for row in read_bounded(file).to_pylist():
        lines += [f"step {row['step']}, sequence {row['sequence']}"]
        lines += [_marked_text(tokenizer, {"prompt_tokens": [], **row}), ""]
    return "\n".join(lines).rstrip()


def _tokenizer(file: Path, trusted: bool) -> PreTrainedTokenizerBase:
    """Return the tokenizer of the run that wrote a trajectory file."""
    config = RunDirectory(file.absolute().parent.parent).config_path
    if not config.is_file():
        raise ConfigError(
            f"--mask reads tokens by the tokenizer of the run, and {config} is not there. Give a "
            "run.directory, or a file of its folder trajectories."
        )
    from plimsoll.commands.found_models import refuse_code  # most who read rollouts need neither
    from plimsoll.model.load import load_tokenizer

    values = value_at(read_tree_of(str(config), []).values, ("actor", "model")) or {}
    if not trusted:
        refuse_code(str(config), Tree({"actor": {"model": values}}, {}))
    model = validate(ModelConfig, Tree(values, {}))
    return load_tokenizer(model.path, model.trust_remote_code)


def _marked_text(tokenizer: PreTrainedTokenizerBase, row: Mapping[str, Any]) -> str:
    """Return the decoded tokens of a row; lines of those that are learned from begin with `+`."""
    tokens = [*row["prompt_tokens"], *row["tokens"]]
    learned = [*[False] * len(row["prompt_tokens"]), *row["loss_mask"]]
    texts = []
    for is_learned, span in groupby(range(len(tokens)), learned.__getitem__):
        text = str(tokenizer.decode([tokens[i] for i in span], skip_special_tokens=False))
        texts += [f"{'+ ' if is_learned else '  '}{line}" for line in text.split("\n")]
    return "\n".join(texts)


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
    if query.diff is None and len(groups) > query.count:
        return overview_text(step, groups, width)

    def marked(step: int, group: ResponseGroup) -> StepGroup:
        if query.mask:
            [group] = mark_learned_tokens([group], steps[step], trusted=query.trusted)
        return step, group

    if query.diff is None:
        return "\n\n".join(group_text(*marked(step, group)) for group in groups)
    pairs = _pairs(path, steps, step, groups, query)
    return "\n\n".join(pair_text(marked(*earlier), marked(*later)) for earlier, later in pairs)


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


def _pairs(
    path: Path,
    steps: Mapping[int, Path],
    step: int,
    groups: Sequence[ResponseGroup],
    query: RolloutQuery,
) -> list[tuple[StepGroup, StepGroup]]:
    """Return the pairs of groups whose mean reward differs most between two steps, in their order.

    There are at most `query.count`. Each pair has the same prompt in both steps.
    """
    assert query.diff is not None
    by_prompt = {_prompt(group): group for group in _read(path, steps, query.diff)}
    pairs = [(group, by_prompt[_prompt(group)]) for group in groups if _prompt(group) in by_prompt]
    if not pairs:
        indices = set(map(_prompt, groups))
        shared = [
            place
            for place, file in steps.items()
            if place != step
            and not indices.isdisjoint(read_bounded(file, ["prompt_index"])[0].to_pylist())
        ]
        where = f"Steps that have some: {_spans(shared)}" if shared else "No other step has any"
        raise ConfigError(
            f"Step {query.diff} has none of the requested prompts of step {step}. {where}."
        )
    pairs.sort(key=lambda pair: -rank(abs(pair[0].reward - pair[1].reward)))
    placed = [((step, group), (query.diff, before)) for group, before in pairs[: query.count]]
    return [(b, a) if b[0] < a[0] else (a, b) for a, b in placed]


def _prompt(group: ResponseGroup) -> int:
    """Return the number that identifies a prompt in all steps."""
    return group.responses[0].prompt_index
