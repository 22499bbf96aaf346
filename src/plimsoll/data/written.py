"""What a chat template leaves out of a conversation.

A template is a program, and may write less than a row holds: no system turn, no tool turn, no
reasoning. What is not written is neither learned nor read by the model, so a row with such a turn
is bad. There is one exception. Many templates (Qwen3's, for one) drop the reasoning of the
assistant's earlier turns, as they do when the model is used. Where such a turn is not learned, this
is as it should be: the rows are counted, and the run tells how many there are.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from plimsoll.data.pieces import Messages, is_learned
from plimsoll.errors import DataError

REASONING = ("reasoning_content", "reasoning", "thinking")
"""Keys of a turn that hold what the assistant thought before it answered."""
_THOUGHT = re.compile(r"(?:.*<think>)?(.*)</think>(.*)", re.DOTALL)
"""A turn's content as templates take it apart: what was thought, and what is said."""
_SHOWN = 60
"""Characters of a text that an error quotes."""


@dataclass(frozen=True)
class _Text:
    """A text of a turn: what it says, or what was thought.

    number: which turn has it, from 1; 0 of the system message of the settings. learned: whether the
    turn is.
    """

    number: int
    role: str
    key: str
    text: str
    thought: bool
    learned: bool


def check_written(turns: Messages, text: str | None, system: str | None = None) -> bool:
    """Return whether the reasoning of a turn that is not learned is left out.

    Args:
        turns: the conversation, with its marks of what is learned.
        text: what the template makes of it; None: their contents, joined as plain text.
        system: the system message of the settings, where the conversation has none.

    Raises:
        DataError: anything else is left out. Its message names the turn and the key.
    """
    texts = [one for one in (*_texts(turns), *_settings(system)) if one.text.strip()]
    if text is None:
        lacking = [one for one in texts if one.key != "content"]
    else:
        lacking = [*_lacking(texts, _dense(text))]
    for one in lacking:
        if one.learned or not one.thought:
            raise DataError(_told(one, plain=text is None))
    return bool(lacking)


def _texts(turns: Messages) -> Iterator[_Text]:
    for number, turn in enumerate(turns, start=1):
        role, said, learned = str(turn["role"]), str(turn["content"]), is_learned(turn)
        if role == "assistant":
            thoughts = {key: turn[key] for key in REASONING if isinstance(turn.get(key), str)}
            if (within := _THOUGHT.fullmatch(said)) is not None:
                thoughts["content"], said = within.groups()
            for key, thought in thoughts.items():
                yield _Text(number, role, key, thought, thought=True, learned=learned)
        yield _Text(number, role, "content", said, thought=False, learned=learned)


def _settings(system: str | None) -> Iterator[_Text]:
    if system is not None:
        yield _Text(0, "system", "content", system, thought=False, learned=False)


def _lacking(texts: Sequence[_Text], written: str) -> Iterator[_Text]:
    """The texts that are written less often than turns have them. If several turns have the same
    text, the one that templates are likeliest to leave out lacks it.

    White space does not count, as many templates trim it, and a text may be written as it is within
    a JSON string.
    """
    seen: Counter[str] = Counter()
    for one in sorted(texts, key=_likelihood):
        dense = _dense(one.text)
        within = _dense(json.dumps(one.text.strip(), ensure_ascii=False)[1:-1])
        seen[dense] += 1
        if sum(map(written.count, {dense, within})) < seen[dense]:
            yield one


def _likelihood(one: _Text) -> tuple[bool, bool, bool]:
    """How likely templates leave a text out, to sort by."""
    return one.thought, one.thought and not one.learned, one.role in ("system", "tool")


def _dense(text: str) -> str:
    """Return the text without white space."""
    return "".join(text.split())


def _told(one: _Text, *, plain: bool) -> str:
    leaves = "plain text leaves" if plain else "the chat template leaves"
    fix = "Write it into the content" if plain else "Set `data.chat_template` to one that has it"
    shown = repr(one.text.strip()[:_SHOWN])
    if one.number == 0:
        return (
            f"would begin with `data.system`, which {leaves} out: {shown}. {fix}, or leave it out"
        )
    what = "text"
    if one.thought:
        what = "reasoning"
        fix += ", mark the turn `train: false` (it is then not learned)"
    return (
        f"has a turn {one.number} ({one.role}) with {what} in its `{one.key}` that {leaves} out: "
        f"{shown}. {fix}, or take it out of the row"
    )
