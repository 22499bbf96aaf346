"""Environments of verifiers: `verifiers:TASKSET`, or `verifiers:ENVIRONMENT+TASKSET`.

A process of verifiers' own Python plays the episodes (`interop/verifiers/`). It asks the policy
for each turn through the endpoint, as any agent does.
"""

from __future__ import annotations

from functools import partial

from plimsoll.environment.adapters import EnvironmentAdapter, EpisodeAgent

PREFIX = "verifiers:"


def open_environment(name: str) -> EpisodeAgent:
    """Return the agent of an environment. Its process starts with the first episode."""
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
