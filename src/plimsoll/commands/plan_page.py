"""`plimsoll plan CONFIG --open`: show the memory plan as a page on which users can try settings.

Each change on the page is a request, and the server plans again from the current config file. No
file is written.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from plimsoll.commands.planning import advise_job, plan_job
from plimsoll.config.flags import Flag, parse_flags, write_flags
from plimsoll.config.load import read_config_text
from plimsoll.config.secrets import mask_secrets
from plimsoll.config.yaml_tree import write_value
from plimsoll.errors import ConfigError, PlimsollError
from plimsoll.jobs.which import load_any
from plimsoll.machine.guard import require_server
from plimsoll.memory.weigh import Plan
from plimsoll.page.plan import (
    controls,
    describe_advice,
    describe_plan,
    flags_from,
    merge_flags,
    peaks,
)
from plimsoll.page.serve import PLAN, Query, render_page, serve
from plimsoll.resolve.run_spec import RunSpec


def open_plan(path: str, flags: Sequence[str], host: str, port: int) -> None:
    """Serve the page of a config's plan until the process is interrupted.

    Raises ConfigError or SettingsConflict if the config cannot be loaded, and ConfigError if the
    address cannot be used.
    """
    require_server(" `plimsoll plan --html` writes a file without it.")
    load_any(path, flags)
    text = render_page(f"plan of {path}", None, PLAN)
    serve(text, lambda name, query: answer(path, flags, name, query), host, port)


def plan_html(path: str, flags: Sequence[str], plan: Plan) -> str:
    """Return the text of one HTML file that shows a plan, without settings to change."""
    values = {
        "config": path,
        "job": plan.job.spec.job.name,
        "controls": [],
        "before": None,
        "refusal": None,
        "plan": describe_plan(plan),
        "copies": _copies(path, parse_flags(flags)),
    }
    return render_page(f"plan of {path}", {"plan": values}, PLAN)


def answer(path: str, flags: Sequence[str], name: str, query: Query) -> dict[str, Any]:
    """Return the JSON values for a request of the page: a plan, or changes that would fit.

    Args:
        path: The config.
        flags: The flags of the command.
        name: The request: "plan" or "fits".
        query: The text of each key that the user changed on the page.

    Raises the errors of `load_any` if the config itself is wrong, and ConfigError for another name.
    """
    if name not in _ANSWERS:
        raise ConfigError(f"There is no {name!r}. There are: {', '.join(_ANSWERS)}.")
    return _ANSWERS[name](path, flags, query)


def _plan(path: str, flags: Sequence[str], query: Query) -> dict[str, Any]:
    """Return values of the plan with the user's changes, and a summary of the plan without them.

    If the changes are refused, "plan" is None and "refusal" has the reason.
    """
    spec = load_any(path, flags)
    values: dict[str, Any] = {
        "config": path,
        "job": spec.job.name,
        "controls": [asdict(control) for control in controls(spec, query)],
    }
    try:
        flags_made = _changed_flags(spec, flags, query)
        plan = plan_job(load_any(path, _words(flags_made)))
    except PlimsollError as error:
        values |= {"before": _before(spec), "refusal": str(error)}
        return values | {"plan": None, "copies": []}
    return values | {
        "before": _before(spec) if query else _summary(plan),
        "refusal": None,
        "plan": describe_plan(plan),
        "copies": _copies(path, flags_made),
    }


def _fits(path: str, flags: Sequence[str], query: Query) -> dict[str, Any]:
    """Return advice to make the changed config fit; raise PlimsollError if a change is refused."""
    flags_made = _changed_flags(load_any(path, flags), flags, query)
    return describe_advice(advise_job(load_any(path, _words(flags_made))))


_ANSWERS: Mapping[str, Callable[[str, Sequence[str], Query], dict[str, Any]]] = {
    "plan": _plan,
    "fits": _fits,
}


def _changed_flags(spec: RunSpec[Any], flags: Sequence[str], query: Query) -> tuple[Flag, ...]:
    """Return the flags of the command, with the user's changes replacing or following them."""
    return merge_flags(parse_flags(flags), flags_from(spec, query))


def _before(spec: RunSpec[Any]) -> dict[str, Any] | None:
    try:
        plan = plan_job(spec)
    except PlimsollError:
        return None
    return _summary(plan)


def _summary(plan: Plan) -> dict[str, Any]:
    return {"verdict": plan.verdict, "peaks": peaks(plan)}


def _words(flags: Sequence[Flag]) -> list[str]:
    return [f"{flag.name}={write_value(flag.value)}" for flag in flags]


def _copies(path: str, flags: Sequence[Flag]) -> list[dict[str, str]]:
    """Return texts to copy, with titles: the config with the flags in it, then the command.

    If the config file cannot be edited, there is only the command. Both are without secrets.
    """
    command = mask_secrets(shlex.join(["plimsoll", "plan", path, *_words(flags)]))
    copies = [{"title": "The command with these settings", "text": command}]
    try:
        text = mask_secrets(write_flags(read_config_text(path), path, flags))
    except ConfigError:
        return copies
    return [{"title": "The config with these settings", "text": text}, *copies]
