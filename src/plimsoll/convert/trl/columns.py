"""Which columns are read. TRL knows formats by the names of the columns: they are looked at where
the data is a file here."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

from plimsoll.convert.options import Options
from plimsoll.convert.outcome import Outcome, Remark
from plimsoll.errors import ConfigError

Columns = Mapping[str, tuple[str, tuple[str, ...]]]
"""The settings of a source, with the columns' names and the flags that say so."""
_SOLVED = ("accuracy_reward", "reasoning_accuracy_reward")
"""Reward functions that read the column `solution`."""


@cache
def first_row(path: str) -> Mapping[str, object] | None:
    """Of a file or folder here; None of a name on the hub, and of what cannot be read, which the
    dry run tells."""
    if not Path(path).exists():
        return None
    from plimsoll.config.data import SourceConfig
    from plimsoll.data.report import RawRow
    from plimsoll.data.sources import read_rows

    try:
        row = next(iter(read_rows(SourceConfig(path=path, limit=1), whole=True)), None)
    except (ConfigError, OSError):
        return None
    return row.values if isinstance(row, RawRow) else None


def columns(o: Options, row: Mapping[str, object] | None) -> Columns:
    """Of a data set with such rows."""
    if o.rl:
        solved = [one for one in o["reward_funcs"] or () if one in _SOLVED]
        reference: Columns = {"reference": ("solution", ("reward_funcs",))} if solved else {}
        return {**_plain("prompt"), **reference}
    tools = _plain("tools") if row is not None and row.get("tools") else {}
    if o.pairs:
        return {**_plain(*_asked(row), "chosen", "rejected"), **tools}
    if o.command == "kto":
        return {**_plain("prompt", "label"), "response": ("completion", ()), **tools}
    return {**(found := _of_sft(o, row)), **({} if "text" in found else tools)}


def _of_sft(o: Options, row: Mapping[str, object] | None) -> Columns:
    """In the order in which TRL looks for them."""
    field, flag = str(o["dataset_text_field"]), tuple(o.given("dataset_text_field"))
    if row is None:
        if flag:
            return {"text": (field, flag)}
        pair = o["completion_only_loss"]
        return _answered(o) if pair else _plain("messages")
    if "messages" in row:
        return _plain("messages")
    if "conversations" in row:
        return {"messages": ("conversations", ())}
    return _answered(o) if "prompt" in row and "completion" in row else {"text": (field, flag)}


def _answered(o: Options) -> Columns:
    flag = tuple(o.given("completion_only_loss"))
    return {"prompt": ("prompt", flag), "response": ("completion", flag)}


def _plain(*names: str) -> Columns:
    return {name: (name, ()) for name in names}


def _asked(row: Mapping[str, object] | None) -> tuple[str, ...]:
    """The column with the prompts of pairs: none where responses are whole conversations."""
    if row is None or row.get("prompt") is None:
        return ()
    chosen = row.get("chosen")
    first = chosen[0] if isinstance(chosen, list) and chosen else None
    whole = isinstance(first, dict) and first.get("role") != "assistant"
    return () if whole else ("prompt",)


def to_check(o: Options, key: str, row: Mapping[str, object] | None) -> Iterator[Outcome]:
    """What is not known of them."""
    if row is not None:
        return
    if o.pairs:
        why = (
            "if prompts are in a column `prompt`, write prompt: prompt; without it both responses "
        )
        why += "hold the whole conversation"
        yield Remark("check", f"{key}.chosen", why)
    elif "messages" in columns(o, row):
        why = "if the rows have `prompt` and `completion`, write prompt: prompt and response: "
        why += "completion; if they have plain text, write text: text"
        yield Remark("check", f"{key}.messages", why)
