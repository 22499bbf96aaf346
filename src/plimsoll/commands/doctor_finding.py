"""What the doctor found out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

State = Literal["ok", "warn", "wrong"]


@dataclass(frozen=True)
class Finding:
    """One thing that was checked. seen: what there is. why, fix: "" where state is ok."""

    name: str
    state: State
    seen: str
    why: str = ""
    fix: str = ""
