"""Fail each test in which a stream did not wait for another, in this process or in its children."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from fakecard.control import fail_at
from fakecard.library import library, why_not

_SEEN = tempfile.NamedTemporaryFile(prefix="fakecard-", suffix=".txt")  # noqa: SIM115 (until the end)
os.environ["FAKECARD_RACES"] = _SEEN.name
"""Where all processes write their races; every worker of pytest-xdist has a file of its own."""


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call() -> Iterator[None]:
    before = len(Path(_SEEN.name).read_text())
    result = yield
    races = dict.fromkeys(Path(_SEEN.name).read_text()[before:].splitlines())
    assert not races, "streams that did not wait for one another:\n" + "\n".join(races)
    return result


def pytest_runtest_teardown() -> None:
    if not why_not():
        library().fc_refuse_sync(0)
        fail_at(-1)
