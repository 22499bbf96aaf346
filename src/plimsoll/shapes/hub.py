"""Whether the hub has what a name means, seen before anything asks for files of it.

Who reads from the hub asks again and again where nothing answers: half a minute for each file.
Here it is asked once, for a few seconds. What is in its cache is not asked for.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import cache
from pathlib import Path
from queue import Empty, Queue
from threading import Thread
from typing import Literal

from plimsoll.shapes.known_models import near_names
from plimsoll.shapes.missing_path import near_path

Kind = Literal["model", "dataset"]
_PATIENCE = 3.0
"""Seconds; a name server that does not answer takes longer than any time limit of HTTP."""


def not_on_hub(name: str, kind: Kind) -> tuple[str, str] | None:
    """Why nothing can be read of a name that is no path here, and what to write instead.

    None where the hub has it or its cache does; and where the hub answers with troubles of its
    own, which those who read from it wait out.
    """
    from huggingface_hub import HfApi, constants
    from huggingface_hub.errors import HFValidationError, RepositoryNotFoundError

    if _is_cached(name, kind):
        return None
    looked = f"There is no such path here, nothing of it in {constants.HF_HUB_CACHE}, "
    correct = f"correct the path or name{_near(name, kind)}"
    if constants.is_offline_mode():
        why = f"{looked}and HF_HUB_OFFLINE or TRANSFORMERS_OFFLINE forbids to ask the hub."
        return why, f"{correct}; or unset the variable, to download it"
    if silence := _silence():
        why = f"{looked}and the hub ({constants.ENDPOINT}) does not answer: {silence}."
        return why, f"{correct}; or connect this machine, to download it"
    api = HfApi(endpoint=constants.ENDPOINT)
    answer = _failure(lambda: api.repo_info(name, repo_type=kind, timeout=_PATIENCE))
    if isinstance(answer, HFValidationError | RepositoryNotFoundError):
        why = f"{looked}and the hub ({constants.ENDPOINT}) shows no {kind} of this name."
        return why, f"{correct}; or, if it is not public, log in with `hf auth login`"
    return None


@cache
def _silence() -> str | None:
    """Why the hub does not answer; None where it does, whatever it says."""
    from huggingface_hub import constants, get_session

    failure = _failure(lambda: get_session().head(constants.ENDPOINT, timeout=_PATIENCE))
    return None if failure is None else str(failure) or type(failure).__name__


def _failure(call: Callable[[], object]) -> Exception | None:
    """What a call raises; TimeoutError where it takes too long, and is left to itself."""
    raised: Queue[Exception | None] = Queue()

    def run() -> None:
        try:
            call()
        except Exception as error:  # noqa: BLE001 - of an HTTP library that the hub's chooses
            raised.put(error)
        else:
            raised.put(None)

    Thread(target=run, daemon=True).start()
    try:
        return raised.get(timeout=_PATIENCE + 0.5)
    except Empty:
        return TimeoutError(f"nothing came within {_PATIENCE:g} s")


def _is_cached(name: str, kind: Kind) -> bool:
    """Whether it was read from the hub before, or a part of it."""
    from huggingface_hub import constants

    places = [Path(constants.HF_HUB_CACHE) / f"{kind}s--{name.replace('/', '--')}" / "snapshots"]
    if kind == "dataset":  # as `datasets` keeps what it has made of it
        prepared = os.environ.get("HF_DATASETS_CACHE", Path(constants.HF_HOME) / "datasets")
        places.append(Path(prepared) / name.replace("/", "___"))
    return any(place.is_dir() and any(place.iterdir()) for place in places)


def _near(name: str, kind: Kind) -> str:
    here = near_path(Path(name))
    found = [] if here is None else [str(here)]
    names = near_names(name) if kind == "model" else []
    found += [] if name in names else names
    return f" (did you mean {' or '.join(found)}?)" if found else ""
