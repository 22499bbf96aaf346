"""Compute rewards on all nodes of a run: an actor on each has the processes that they wait for."""

from __future__ import annotations

import asyncio
import os
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import replace
from typing import Any

import ray
from ray.exceptions import ActorDiedError, ActorUnavailableError, RayError, RayTaskError

from plimsoll.cluster.ray_actors import prepare_process
from plimsoll.cluster.ray_members import on_node
from plimsoll.config.reward import RewardConfig
from plimsoll.errors import PlimsollError
from plimsoll.machine.faults import fault_settings
from plimsoll.records import Trajectory
from plimsoll.reward.outcome import Failed, Outcome, RewardCall
from plimsoll.reward.score import build_rule, open_call

_BEGINNINGS, _PAUSE_SECONDS = 30, 1.0
"""How often a process that begins again is asked again, and seconds between."""


class RewardActor:
    """The actor that computes the rewards of one node, many at once.

    Consumes: trajectories. Waits for: the functions of rewards, in threads and processes.
    Unblocked by: their time limits. Produces: outcomes. Shut down with its process.
    """

    def __init__(self, directory: str, environment: Mapping[str, str]) -> None:
        """Prepare the process.

        Args:
            directory: The command's.
            environment: The command's, for functions of users: what this node lacks of it is set.
        """
        prepare_process(directory)
        for name, value in environment.items():
            os.environ.setdefault(name, value)
        folders = environment.get("PYTHONPATH", "").split(os.pathsep)
        sys.path += [folder for folder in folders if folder and folder not in sys.path]
        self._calls: dict[str, RewardCall] = {}
        self._stack = AsyncExitStack()  # open for as long as the process lives

    async def score(
        self, name: str, config: RewardConfig, trajectories: Sequence[Trajectory]
    ) -> Sequence[Outcome]:
        """Compute a reward of the config, which has this name, by one try."""
        if name not in self._calls:
            self._calls[name] = open_call(build_rule(name, config), self._stack)
        return await self._calls[name](trajectories)


class RewardNodes:
    """The `RewardHosts` of a run on several nodes.

    Args:
        nodes: The addresses of the nodes, by Ray's ids of them.
    """

    def __init__(self, nodes: Mapping[str, str]) -> None:
        self.count = len(nodes)
        actor = ray.remote(
            num_cpus=0,
            max_concurrency=10_000,
            max_restarts=-1,
            runtime_env={"env_vars": fault_settings()},
        )(RewardActor)
        # In the object store, as what an actor is made with is kept where others read it.
        # It is held, as an actor that begins again reads it again.
        self._environment = ray.put(dict(os.environ))
        self._addresses = nodes
        self._actors: dict[str, Any] = {
            node_id: actor.options(scheduling_strategy=on_node(node_id)).remote(
                os.getcwd(), self._environment
            )
            for node_id in nodes
        }
        self._open: Counter[str] = Counter()

    async def score(
        self, name: str, config: RewardConfig, trajectories: Sequence[Trajectory]
    ) -> Sequence[Outcome]:
        """Compute a reward on the node with the fewest open calls; see `RewardHosts`.

        A process that has died begins again, and is asked again meanwhile.
        """
        for _ in range(_BEGINNINGS):
            with suppress(ActorUnavailableError):
                return await self._ask(name, config, trajectories)
            await asyncio.sleep(_PAUSE_SECONDS)
        late = Failed("'s process does not begin again after it died", unanswered=True)
        return [late] * len(trajectories)

    async def _ask(
        self, name: str, config: RewardConfig, trajectories: Sequence[Trajectory]
    ) -> Sequence[Outcome]:
        if not self._actors:
            raise PlimsollError("rewards: the processes of all nodes that compute them have died")
        node_id = min(self._actors, key=lambda one: self._open[one])
        actor, address = self._actors[node_id], self._addresses[node_id]
        self._open[node_id] += 1
        try:
            reference = actor.score.remote(name, config, trajectories)
            outcomes: Sequence[Outcome] = await asyncio.wrap_future(reference.future())
            return [
                replace(one, said=f" on node {address}{one.said}")
                if isinstance(one, Failed)
                else one
                for one in outcomes
            ]
        except RayTaskError as error:
            cause = error.cause
            if isinstance(cause, PlimsollError):
                raise type(cause)(f"{cause}\n  On node: {address}") from error
            raise
        except ActorUnavailableError:
            raise
        except RayError as error:
            if isinstance(error, ActorDiedError):  # for good, as the node is gone
                self._actors.pop(node_id, None)
            died = Failed(f"'s process on node {address} has died", str(error), unanswered=True)
            return [died] * len(trajectories)
        finally:
            self._open[node_id] -= 1

    def close(self) -> None:
        """End all actors."""
        actors, self._actors = [*self._actors.values()], {}
        for actor in actors:
            ray.kill(actor)
