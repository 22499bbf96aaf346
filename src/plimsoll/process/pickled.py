"""Messages as pickles, which may hold any object, each written as one line.

Only for children that run the user's own code, which may do here what it may do there. Programs of
a policy never answer in pickles.
"""

from __future__ import annotations

import pickle
from base64 import b64decode, b64encode
from typing import Any


def dumps(value: object) -> str:
    """Return a value as a line."""
    return b64encode(pickle.dumps(value)).decode()


def loads(line: str | bytes) -> Any:
    """Return the value of a line."""
    return pickle.loads(b64decode(line))  # noqa: S301  from the user's own code
