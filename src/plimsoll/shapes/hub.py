"""Check whether a name exists on the Hugging Face hub, before any library requests its files.

Libraries that read from the hub retry for half a minute for each file if nothing answers. This
check makes one request with a time limit of seconds, and none for a name in the hub's cache.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import Future
from functools import cache
from pathlib import Path
from threading import Thread
from typing import Literal

from plimsoll.shapes.known_models import near_names
from plimsoll.shapes.missing_path import near_path

RepositoryKind = Literal["model", "dataset"]
_PATIENCE = 3.0
"""Seconds; a name server that does not answer takes longer than any time limit of HTTP."""


def not_on_hub(name: str, kind: RepositoryKind) -> tuple[str, str] | None:
    """Return why a name cannot be read from the hub, and what to write instead; None if it can.

    The result is also None if the hub itself has an error: libraries then try again.
    """
    from huggingface_hub import HfApi, constants
    from huggingface_hub.errors import HFValidationError, RepositoryNotFoundError

    if _is_cached(name, kind):
        return None
    why = f"There is no such path here, nothing of it in {constants.HF_HUB_CACHE}, and"
    remedy = f"correct the path or name{_suggestion(name, kind)}"
    if constants.is_offline_mode():
        why += " HF_HUB_OFFLINE or TRANSFORMERS_OFFLINE forbids requests to the hub."
        return why, f"{remedy}; or unset the variable, to download it"
    if error := _connection_error():
        why += f" the hub ({constants.ENDPOINT}) does not answer: {error}."
        return why, f"{remedy}; or connect this machine, to download it"
    api = HfApi(endpoint=constants.ENDPOINT)
    failure = _failure(lambda: api.repo_info(name, repo_type=kind, timeout=_PATIENCE))
    if isinstance(failure, HFValidationError | RepositoryNotFoundError):
        why += f" the hub ({constants.ENDPOINT}) shows no {kind} of this name."
        return why, f"{remedy}; or, if it is not public, log in with `hf auth login`"
    return None


@cache
def _connection_error() -> str | None:
    """Return why the hub does not answer; None if it answers, even with an error."""
    from huggingface_hub import constants, get_session

    failure = _failure(lambda: get_session().head(constants.ENDPOINT, timeout=_PATIENCE))
    return None if failure is None else str(failure) or type(failure).__name__


def _failure(call: Callable[[], object]) -> Exception | None:
    """Return the exception of a call, or None; TimeoutError if the call takes too long."""
    raised: Future[Exception | None] = Future()

    def run() -> None:
        try:
            call()
            raised.set_result(None)
        except Exception as error:  # noqa: BLE001 - whatever the hub's HTTP library raises
            raised.set_result(error)

    Thread(target=run, daemon=True).start()
    try:
        return raised.result(timeout=_PATIENCE + 0.5)
    except TimeoutError:
        return TimeoutError(f"nothing came within {_PATIENCE:g} s")


def _is_cached(name: str, kind: RepositoryKind) -> bool:
    """Return whether the name, or a part of it, was read from the hub before."""
    from huggingface_hub import constants

    folders = [Path(constants.HF_HUB_CACHE) / f"{kind}s--{name.replace('/', '--')}" / "snapshots"]
    if kind == "dataset":  # prepared by the library `datasets`
        prepared = os.environ.get("HF_DATASETS_CACHE", Path(constants.HF_HOME) / "datasets")
        folders.append(Path(prepared) / name.replace("/", "___"))
    return any(folder.is_dir() and any(folder.iterdir()) for folder in folders)


def _suggestion(name: str, kind: RepositoryKind) -> str:
    path = near_path(Path(name))
    candidates = [] if path is None else [str(path)]
    names = near_names(name) if kind == "model" else []
    candidates += [] if name in names else names
    return f" (did you mean {' or '.join(candidates)}?)" if candidates else ""
