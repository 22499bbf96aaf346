"""The engine has no levers."""

from __future__ import annotations

from plimsoll.timeline.levers import Lever

LEVERS: tuple[Lever, ...] = ()
