"""Encode messages, which may hold any object, as pickles of one line each.

A pickle can run code when it is read. So this codec is only for children that run the user's code,
which is trusted here, too. A policy's programs never answer in pickles.
"""

from __future__ import annotations

import pickle
from base64 import b64decode, b64encode
from typing import Any


def dumps(value: object) -> str:
    """Return a value, pickled, as one line of base64."""
    return b64encode(pickle.dumps(value)).decode()


def loads(line: str | bytes) -> Any:
    """Return the value in a line from `dumps`."""
    return pickle.loads(b64decode(line))  # noqa: S301  from the user's own code
