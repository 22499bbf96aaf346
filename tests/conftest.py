"""For all tests: hypothesis measures no time, since other work may share the cores."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("plimsoll", deadline=None)
settings.load_profile("plimsoll")
