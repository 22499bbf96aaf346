"""Environments of verifiers: `verifiers:TASKSET`, or `verifiers:ENVIRONMENT+TASKSET`.

A process in verifiers' virtual environment plays the episodes (`interop/verifiers/`). For each turn
it asks the policy through the endpoint, like any agent.
"""

from __future__ import annotations

from functools import partial

from plimsoll.environment.adapters import EnvironmentAdapter, EpisodeAgent

PREFIX = "verifiers:"


def open_environment(name: str) -> EpisodeAgent:
    """Return an agent that plays a verifiers environment; its process starts with episode 1."""
    from plimsoll.interop.verifiers.child import PlayerProcess
    from plimsoll.interop.verifiers.venv import check_environment

    taskset = name.removeprefix(PREFIX)
    process = PlayerProcess(taskset)
    return EpisodeAgent(name, process.play, partial(check_environment, taskset), process.close)


ADAPTER = EnvironmentAdapter(
    "an environment of verifiers",
    f"{PREFIX}TASKSET",
    lambda name: name.startswith(PREFIX),
    open_environment,
    292 * 2**20,
    "measured: verifiers 0.4.0, 400 episodes of one turn at once, 305 MB resident",
)
