"""What a bad input must end in: a refusal with exit code 2 that names the place."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable

import pytest

from plimsoll.cli import main
from plimsoll.errors import ConfigError

DEEP = b"[" * 100_000
NO_OBJECTS = (b"", b"{", b"[]", b"null", b"5", b"\xff\xfe", b'"x"', DEEP)
"""Contents of a file in which a JSON object is needed."""


def refusal(work: Callable[[], object], *places: str) -> str:
    """Return the message of the ConfigError that `work` raises, which names all places."""
    with pytest.raises(ConfigError) as raised:
        work()
    text = str(raised.value)
    assert raised.value.exit_code == 2
    assert all(place in text for place in places), text
    return text


def refused_command(words: list[str], *places: str) -> str:
    """Return what a command writes, which ends with exit code 2 and names all places."""
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        code = main(words)
    text = said.getvalue()
    assert code == 2, (code, text)
    assert text.startswith("error: ") and "Traceback" not in text
    assert all(place in text for place in places), text
    return text


def each(key: str, *values: object) -> list[tuple[str, object]]:
    """Return the key with each of the values."""
    return [(key, value) for value in values]
