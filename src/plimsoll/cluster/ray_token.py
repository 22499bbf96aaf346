"""Ray's authentication token: one for each Ray that a run starts, the cluster's where it joins."""

from __future__ import annotations

import logging
import os
import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from ray._raylet import AuthenticationTokenLoader, Config, GcsClient  # type: ignore[attr-defined]
from ray.exceptions import AuthenticationError

from plimsoll.config.base import AUTO
from plimsoll.run.output import silence

_MODE, _TOKEN = "RAY_AUTH_MODE", "RAY_AUTH_TOKEN"
_STANDARD_ERROR = 2


@contextmanager
def authentication(address: str | None) -> Iterator[None]:
    """Choose Ray's authentication while a Ray starts, or is joined at `address`, inside the block.

    - A Ray that starts gets a token of its own, unless the environment names one. Ray would write
      a new one to ~/.ray: two runs may do so at once, and HOME may refuse it.
    - A cluster gets the token of the environment or of ~/.ray if it asks for one, and not
      otherwise. With a token, this command would ask for it, too, and the processes of a cluster
      without could not call it back. Ray looks at ~/.ray, not at the cluster.

    Afterwards the environment is as it was: the next Ray of this process may differ.

    Raises:
        AuthenticationError: The cluster asks for a token that this machine does not have.
    """
    before = {name: os.environ.get(name) for name in (_MODE, _TOKEN)}
    logging.getLogger("ray").setLevel(logging.ERROR)  # it logs a line about the token
    try:
        if address is None:
            os.environ.setdefault(_TOKEN, secrets.token_hex(32))
        elif address != AUTO:
            os.environ[_MODE] = "token" if _asks_for_token(address) else "disabled"
        _read_environment()
        yield
    except BaseException:
        _restore(before)
        _read_environment()  # Ray ends the process if it is to send a token that is not there
        raise
    _restore(before)


def _restore(before: Mapping[str, str | None]) -> None:
    for name, value in before.items():
        os.environ.pop(name, None)
        if value is not None:
            os.environ[name] = value


def _asks_for_token(address: str) -> bool:
    os.environ[_MODE] = "disabled"
    _read_environment()
    try:
        with _silent_standard_error():  # the client warns of the token that is not sent
            GcsClient(address=address).internal_kv_keys(b"", None)
    except AuthenticationError:
        return True
    return False


def _read_environment() -> None:
    """Let Ray's C++ code read mode and token again; it keeps them as long as the process lives."""
    Config.initialize("")
    AuthenticationTokenLoader.instance().reset_cache()


@contextmanager
def _silent_standard_error() -> Iterator[None]:
    kept = os.dup(_STANDARD_ERROR)
    silence(_STANDARD_ERROR)
    try:
        yield
    finally:
        os.dup2(kept, _STANDARD_ERROR)
        os.close(kept)
