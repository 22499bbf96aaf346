"""The rule that no URL in a config holds a password.

A config is written into the run's directory and to loggers, and errors name its URLs.
"""

from __future__ import annotations

from collections.abc import Iterator
from urllib.parse import urlsplit

from plimsoll.config.problems import Code, Problem, invalid


def password_in(key: str, url: str, fix: str, code: Code | None = None) -> Iterator[Problem]:
    """Yield a problem, which does not show the password, if a URL has a user or a password."""
    parts = urlsplit(url)
    _, at, host = parts.netloc.rpartition("@")
    if at:
        shown = f"{parts.scheme}://***@{host}{parts.path}"
        why = "A password in a URL would be written into the run's directory, logs and errors."
        yield invalid(key, shown, why, fix, code=code)
