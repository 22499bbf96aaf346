"""How groups of responses are shown: side by side on a terminal, elsewhere one under another."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest
from statistics import fmean
from textwrap import indent

from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from plimsoll.run.counting import counted
from plimsoll.run.responses import ResponseGroup, SampledResponse, escape_controls, excerpt

_NARROWEST = 36
"""Of a column of responses, characters."""
_PLAIN_WIDTH = 100
_OVERVIEW = "{:>6} {:>10} {:>10} {:>10} {:>7} {:>8}  "
_STYLES = {
    "assistant": "default",
    "call": "magenta",
    "tool": "yellow",
    "wrong": "red",
    "learned": "green",
    "other": "dim",
}
_OTHERS = "blue"
"""Of who else speaks in an episode."""
StepGroup = tuple[int, ResponseGroup]
"""A group and its step."""


def overview_text(step: int, groups: Sequence[ResponseGroup], width: int | None) -> str:
    """A line for each group. width: None where it does not matter."""
    head = _OVERVIEW.format("group", "reward", "lowest", "highest", "tokens", "cut off")
    room = max((_PLAIN_WIDTH if width is None else width) - len(head), 10)
    lines = [_line(group) + excerpt(group.prompt, room) for group in groups]
    responses = [one for group in groups for one in group.responses]
    equal = sum(group.spread == 0 for group in groups)
    about = (
        f"Step {step}: {counted(len(groups), 'group')}, {counted(len(responses), 'response')}, "
        f"mean reward {fmean(one.reward for one in responses):.4g}. Groups whose rewards are all "
        f"equal: {equal}."
    )
    how = "--group G shows one in full; --worst, --best and --diff STEP choose one."
    return "\n".join([about, "", head + "prompt", *lines, "", how])


def _line(group: ResponseGroup) -> str:
    rewards = [f"{value:.4g}" for value in (group.reward, *_ends(group))]
    tokens = f"{fmean(one.tokens for one in group.responses):.0f}"
    cut = f"{sum(one.cut_off for one in group.responses)}/{len(group.responses)}"
    return _OVERVIEW.format(group.number, *rewards, tokens, cut)


def _ends(group: ResponseGroup) -> tuple[float, float]:
    return group.responses[-1].reward, group.responses[0].reward


def group_text(step: int, group: ResponseGroup) -> str:
    """A group in full, without codes for a terminal."""
    return "\n".join([_title(step, group), *_asked(group), "", *_answers(group)])


def compared_text(earlier: StepGroup, later: StepGroup) -> str:
    """A prompt's groups of two steps, one after the other."""
    lines = [_change(earlier, later), *_asked(later[1]), ""]
    for step, group in (earlier, later):
        lines += [_title(step, group), "", *_answers(group)]
    return "\n".join(lines)


def _answers(group: ResponseGroup) -> list[str]:
    return [
        f"[{one.sample_index}] {_figures(one)}\n{indent(_text(one), '    ')}\n"
        for one in group.responses
    ]


def group_columns(step: int, group: ResponseGroup, terminal: Console) -> str:
    """A group in full, its responses side by side."""
    columns = max(1, min(len(group.responses), terminal.width // _NARROWEST))
    table = _columns(columns)
    cells = [_cell(one) for one in group.responses]
    for start in range(0, len(cells), columns):
        table.add_row(*cells[start : start + columns])
    return _drawn(terminal, Text(_title(step, group), style="bold"), *_shown_asked(group), table)


def compared_columns(earlier: StepGroup, later: StepGroup, terminal: Console) -> str:
    """A prompt's groups of two steps side by side, each from its highest reward to its lowest."""
    table = _columns(2)
    table.add_row(*(Text(_title(*placed), style="bold") for placed in (earlier, later)))
    for pair in zip_longest(earlier[1].responses, later[1].responses):
        table.add_row(*(Text("") if one is None else _cell(one) for one in pair))
    about = Text(_change(earlier, later), style="bold")
    return _drawn(terminal, about, *_shown_asked(later[1]), table)


def _columns(count: int) -> Table:
    table = Table(show_header=False, show_lines=True, expand=True, border_style="dim")
    for _ in range(count):
        table.add_column(ratio=1, overflow="fold")
    return table


def _cell(one: SampledResponse) -> Text:
    found = Text().append(f"[{one.sample_index}] {_figures(one)}\n\n", style="cyan")
    for piece in one.shown:
        found.append(escape_controls(piece.text), style=_STYLES.get(piece.kind, _OTHERS))
    return found


def _text(one: SampledResponse) -> str:
    return "".join(escape_controls(piece.text) for piece in one.shown)


def _drawn(terminal: Console, *shown: RenderableType) -> str:
    with terminal.capture() as drawn:
        terminal.print(*shown, sep="\n")
    return drawn.get().rstrip("\n")


def _shown_asked(group: ResponseGroup) -> list[RenderableType]:
    return [Text(line) for line in _asked(group)]


def _title(step: int, group: ResponseGroup) -> str:
    count = counted(len(group.responses), "response")
    lowest, highest = _ends(group)
    spread = f" ({lowest:.4g} to {highest:.4g})" if group.spread else ""
    return f"Step {step}, group {group.number}: {count}, mean reward {group.reward:.4g}{spread}"


def _change(earlier: StepGroup, later: StepGroup) -> str:
    before, after = earlier[1].reward, later[1].reward
    return (
        f"Mean reward {before:.4g} in step {earlier[0]}, {after:.4g} in step {later[0]} "
        f"({after - before:+.4g})"
    )


def _asked(group: ResponseGroup) -> list[str]:
    """The prompt, and what else its row says."""
    first = group.responses[0]
    lines = [f"Prompt {first.prompt_index}{f' of {first.source}' if first.source else ''}"]
    lines.append(indent(escape_controls(first.prompt), "    "))
    if first.reference is not None:
        lines.append(f"Reference: {escape_controls(first.reference)}")
    return lines


def _figures(one: SampledResponse) -> str:
    """Such as `reward 1 | right 1, form 0 | advantage +0.71 | 57 tokens | version 11`."""
    parts = ", ".join(f"{name} {value:.4g}" for name, value in one.parts.items())
    return " | ".join(
        [
            f"reward {one.reward:.4g}",
            *([parts] if len(one.parts) > 1 else []),
            *([f"advantage {one.advantage:+.3g}"] if one.advantage is not None else []),
            counted(one.tokens, "token") + (", cut off" if one.cut_off else ""),
            *([f"version {one.version}"] if one.version is not None else []),
        ]
    )
