"""A file that holds one JSON array, where one object per line is needed: how to convert it."""

from __future__ import annotations

import codecs
import json
from pathlib import Path

_LOOKED_AT = 2**20
"""Bytes: what the first row is told from."""
# ShareGPT's names of turns, to those of messages.
_MESSAGES = (
    '[{"role": {"human": "user", "gpt": "assistant"}.get(t["from"], t["from"]), '
    '"content": t["value"]} for t in r["COLUMN"]]'
)


def conversion(path: Path) -> str | None:
    """A command that makes JSON lines of a file with one array, and what to give then; None where
    the file holds no array, or cannot be read."""
    try:
        with path.open("rb") as file:
            start = file.read(_LOOKED_AT).removeprefix(codecs.BOM_UTF8).lstrip()
    except OSError:  # who reads all of it says why
        return None
    if not start.startswith(b"["):
        return None
    turns = _shared_turns(_first_row(start[1:].decode("utf-8", errors="replace").lstrip()))
    row = f'r | {{"{turns}": {_MESSAGES.replace("COLUMN", turns)}}}' if turns else "r"
    made = f"{path.stem}.jsonl"
    code = f'import json; [print(json.dumps({row})) for r in json.load(open("{path}"))]'
    named = f" and messages: {turns}" if turns else ""
    return f"run  python3 -c '{code}' > {made}  and give path: {made}{named}"


def _first_row(text: str) -> object:
    try:
        return json.JSONDecoder().raw_decode(text)[0]
    except ValueError:
        return None


def _shared_turns(row: object) -> str:
    """The column with turns of ShareGPT's form, `from` and `value`; empty where there is none."""
    if not isinstance(row, dict):
        return ""
    return next((name for name, value in row.items() if _are_turns(value)), "")


def _are_turns(value: object) -> bool:
    return (
        isinstance(value, list)
        and len(value) > 0
        and all(isinstance(turn, dict) and {"from", "value"} <= turn.keys() for turn in value)
    )
