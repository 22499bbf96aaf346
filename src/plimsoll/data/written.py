"""Check that a chat template leaves nothing of a conversation out.

A template is a program, and may write less than a row holds: no system turn, no tool turn, no
reasoning. Text that is not written is neither learned nor read by the model, so a row with such a
turn is bad. There is one exception. Many templates (Qwen3's, for one) drop the reasoning of the
assistant's earlier turns, as they do when the model is used. If such a turn is not learned, the row
is good: the run counts such rows and reports the count.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from plimsoll.data.pieces import SYSTEM_ROLES, TOOL_ROLES, Messages, dense_text, is_learned, quote
from plimsoll.errors import DataError

REASONING = ("reasoning_content", "reasoning", "thinking")
"""Keys of a turn that hold the assistant's reasoning before its answer."""


@dataclass(frozen=True)
class _TurnText:
    """One text of a turn: its content, or its reasoning."""

    number: int
    """The number of the turn, from 1; 0 for the system message of the settings."""
    role: str
    key: str
    """The key of the turn that holds the text."""
    text: str
    thought: bool
    """Whether the text is reasoning."""
    learned: bool
    """Whether the turn is learned."""


def check_written(turns: Messages, text: str | None, system: str | None = None) -> bool:
    """Return whether the template leaves out reasoning of a turn that is not learned.

    Args:
        turns: the conversation, with its marks of what is learned.
        text: the conversation as the template renders it; None: its contents are joined as plain
            text.
        system: the system message of the settings, if the conversation has none.

    Raises:
        DataError: anything else is left out. The message names the turn and the key.
    """
    texts = [*_turn_texts(turns)]
    if system is not None:
        texts.append(_TurnText(0, "system", "content", system, thought=False, learned=False))
    texts = [part for part in texts if part.text.strip()]
    if text is None:
        missing = [part for part in texts if part.key != "content"]
    else:
        missing = [*_find_missing(texts, dense_text(text))]
    for part in missing:
        if part.learned or not part.thought:
            raise DataError(_describe_omission(part, plain=text is None))
    return bool(missing)


def _turn_texts(turns: Messages) -> Iterator[_TurnText]:
    for number, turn in enumerate(turns, start=1):
        role, content, learned = str(turn["role"]), str(turn["content"]), is_learned(turn)
        if role == "assistant":
            thoughts = {key: turn[key] for key in REASONING if isinstance(turn.get(key), str)}
            head, mark, answer = content.rpartition("</think>")
            if mark:  # as templates divide a turn's content
                thoughts["content"], content = head.rpartition("<think>")[2], answer
            for key, thought in thoughts.items():
                yield _TurnText(number, role, key, thought, thought=True, learned=learned)
        yield _TurnText(number, role, "content", content, thought=False, learned=learned)


def _find_missing(texts: Sequence[_TurnText], rendered: str) -> Iterator[_TurnText]:
    """Yield the texts that are rendered less often than turns have them.

    If several turns have the same text, the text that templates are likeliest to leave out is
    missing. White space does not count, as many templates trim it. A text may be written as it is
    or within a JSON string.
    """
    expected: Counter[str] = Counter()
    for part in sorted(texts, key=_omission_order):
        as_is = dense_text(part.text)
        in_json = dense_text(json.dumps(part.text.strip(), ensure_ascii=False)[1:-1])
        expected[as_is] += 1
        if sum(map(rendered.count, {as_is, in_json})) < expected[as_is]:
            yield part


def _omission_order(part: _TurnText) -> tuple[bool, bool, bool]:
    """Return a sort key: texts that templates are likelier to leave out come later."""
    return part.thought, part.thought and not part.learned, part.role in SYSTEM_ROLES + TOOL_ROLES


def _describe_omission(part: _TurnText, *, plain: bool) -> str:
    renderer = "plain text" if plain else "the chat template"
    fix = "Write it into the content" if plain else "Set `data.chat_template` to one that has it"
    quoted = quote(part.text.strip())
    if part.number == 0:
        return (
            f"would begin with `data.system`, which {renderer} leaves out: {quoted}. "
            f"{fix}, or leave it out"
        )
    what = "text"
    if part.thought:
        what = "reasoning"
        fix += ", mark the turn `train: false` (it is then not learned)"
    return (
        f"has a turn {part.number} ({part.role}) with {what} in its `{part.key}` that {renderer} "
        f"leaves out: {quoted}. {fix}, or take it out of the row"
    )
