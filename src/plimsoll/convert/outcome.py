"""What becomes of the settings of another trainer: keys of a config, and remarks on what has none.

Values are what a config file holds. Flags are called by the ids of a table's records; how they are
spelled is of the version that a command is of.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["same", "idle", "lacking", "unknown", "check"]


@dataclass(frozen=True)
class Entry:
    """A key of the config. flags: what it was made of; none: of how the program is started. note:
    how."""

    key: str
    value: object
    flags: tuple[str, ...] = ()
    note: str = ""


@dataclass(frozen=True)
class Remark:
    """On a setting that no key stands for. kind: `same`, it is so without a key; `idle`, it has no
    effect here; `lacking`, there is nothing like it, and it is left out; `unknown`, the trainer has
    no such setting, and it is left out; `check`, it is for the user to see to. about: a flag's id;
    of `check` also a key of the config; of `unknown` what was typed."""

    kind: Kind
    about: str
    why: str


Outcome = Entry | Remark
