"""Ask Ray for the processes of a run: first their cards, then the actors, side by side."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import ray
from ray._private import state
from ray.exceptions import GetTimeoutError, RayError
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table
from ray.util.scheduling_strategies import (
    NodeAffinitySchedulingStrategy,
    PlacementGroupSchedulingStrategy,
)

from plimsoll.cluster.exit_reason import death_reason
from plimsoll.cluster.placement import (
    Claim,
    NodeCards,
    NodeSupply,
    Reservation,
    describe_shortage,
    order_by_node,
    reservations,
    shared_placement,
)
from plimsoll.cluster.ray_actors import EngineActor, Host, Member, RankActor
from plimsoll.config.cluster import ClusterConfig, Device, NodeGroup
from plimsoll.errors import PlimsollError
from plimsoll.machine.faults import fault_settings
from plimsoll.machine.heap import preload_settings
from plimsoll.machine.host import thread_wait_settings
from plimsoll.machine.nvidia import card_order
from plimsoll.run.numbers import plural
from plimsoll.run.output import tell
from plimsoll.sampler.protocol import EngineSpec, rollout_build

R = TypeVar("R")

_LOOK_SECONDS = 20.0
"""How long a call of a function on a node may take."""
_SOON_SECONDS = 10.0
"""After how long a wait for cards tells what is missing."""
_OWN_CARDS = {
    "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
}
"""Settings with which Ray writes a process's cards to CUDA_VISIBLE_DEVICES, and leaves the variable
alone for a process without cards. They override the user's environment."""

Places = dict[NodeGroup, list[Any]]
"""For each process of each group, the Ray strategy that puts it on its node or cards."""


def find_places(
    cluster: ClusterConfig, claims: Sequence[Claim], device: Device, nodes: Sequence[str]
) -> Places:
    """Return the places of all processes: on CPU spread over `nodes`, else on cards for each.

    Raises:
        PlimsollError: the cards are not free within `cluster.start_timeout`.
    """
    places: Places = {}
    if device == "cpu":
        for claim in claims:
            numbers = [cluster.node_of(claim.group, i, claim.count) for i in range(claim.count)]
            places[claim.group] = [on_node(nodes[number]) for number in numbers]
        return places
    for reservation in reservations(cluster, claims):
        cards = _reserve(reservation, cluster.start_timeout)
        for claim, seats in zip(reservation.claims, reservation.seats, strict=True):
            places[claim.group] = [PlacementGroupSchedulingStrategy(cards, i) for i in seats]
    return places


def _reserve(reservation: Reservation, patience: float) -> PlacementGroup:
    """Wait until Ray has reserved the cards; tell the user soon what is missing."""
    strategy = "STRICT_SPREAD" if reservation.apart else "PACK"
    cards = placement_group([{"GPU": count} for count in reservation.bundles], strategy=strategy)
    begin = time.monotonic()
    has_told_user = False
    while not cards.wait(timeout_seconds=min(0.5, patience)):
        waited = time.monotonic() - begin
        if waited > patience:
            raise PlimsollError(
                f"Ray has no cards for the run after {patience:.0f} s (cluster.start_timeout)\n  "
                f"{_shortage(reservation)}\n  Ask for fewer ranks or engines, wait for other jobs, "
                "or join nodes with more GPUs (`ray start`)"
            )
        if waited > _SOON_SECONDS and not has_told_user:
            tell(f"waiting for cards\n  {_shortage(reservation)}")
            has_told_user = True
    return cards


def _shortage(reservation: Reservation) -> str:
    free = state.available_resources_per_node()
    nodes = [node for node in ray.nodes() if node["Alive"]]
    addresses = {node["NodeID"]: node["NodeManagerAddress"] for node in nodes}
    supplies = [
        NodeSupply(
            addresses[node["NodeID"]],
            int(node["Resources"].get("GPU", 0)),
            int(free.get(node["NodeID"], {}).get("GPU", 0)),
        )
        for node in nodes
    ]
    return describe_shortage(reservation, supplies, _holdings(addresses))


def _holdings(addresses: dict[str, str]) -> Iterator[str]:
    """Yield lines on who holds cards, as far as Ray knows: the jobs with placement groups.

    A group's id ends with the id of its job.
    """
    jobs = {job["JobID"]: job for job in state.jobs()}
    own = ray.get_runtime_context().get_job_id()
    held = Counter[tuple[str, str]]()
    for group in placement_group_table().values():
        job = group["placement_group_id"][-len(own) :]
        for bundle, node in group["bundles_to_node_id"].items():
            cards = int(group["bundles"][bundle].get("GPU", 0))
            if cards and node in addresses and group["state"] == "CREATED":
                held[job, addresses[node]] += cards
    for (job, address), cards in held.items():
        who = jobs.get(job, {})
        name = f"`{who.get('Entrypoint', '?')}` (pid {who.get('DriverPid', '?')} on "
        name += f"{who.get('DriverIPAddress', '?')})"
        holder = "this run" if job == own else name
        yield f"{holder} holds {plural(cards, 'GPU')} of {address}"


def create_ranks(places: Sequence[Any], device: str, threads: int) -> list[Any]:
    """Ask Ray for a training rank at each place; return the actors before they have started."""
    environment = {"OMP_NUM_THREADS": str(threads), "DS_ACCELERATOR": device}
    environment |= thread_wait_settings() | card_order() | fault_settings()
    environment |= preload_settings() if device == "cpu" else _OWN_CARDS
    actor = ray.remote(
        num_cpus=0,
        num_gpus=0 if device == "cpu" else 1,
        concurrency_groups={"watch": 1, "signs": 1},
        runtime_env={"env_vars": environment},
    )(RankActor)
    return [actor.options(scheduling_strategy=p).remote(os.getcwd()) for p in places]


@dataclass(frozen=True)
class EngineHome:
    """Where an engine lives, also if it is started again.

    Attributes:
        spec: the engine.
        place: Ray's scheduling strategy.
        shared: the cards of ranks that it shares; empty: it has its own.
    """

    spec: EngineSpec
    place: Any
    shared: tuple[str, ...] = ()

    def with_sequences(self, most: int) -> EngineHome:
        """Return the home of an engine that samples at most so many sequences at once."""
        rollout = self.spec.rollout
        fewer = rollout.engine.model_copy(update={"max_sequences": most})
        return replace(self, spec=replace(self.spec, rollout=rollout.with_engine(fewer)))


def shared_homes(specs: Sequence[EngineSpec], ranks: Sequence[Member]) -> list[EngineHome]:
    """Return the homes of engines on the cards that Ray has already given to the ranks."""
    rank_cards = [NodeCards(member.host.node_id, member.host.cards) for member in ranks]
    shared = shared_placement(rank_cards, len(specs), specs[0].rollout.degrees)
    pairs = zip(specs, shared, strict=True)
    return [EngineHome(spec, on_node(place.node_id), place.cards) for spec, place in pairs]


def create_engine(home: EngineHome) -> Any:
    """Ask Ray for the actor of an engine; return it before it has started."""
    spec, shared = home.spec, home.shared
    environment = {**rollout_build(spec.rollout).environment(spec), **fault_settings()}
    environment |= _OWN_CARDS if spec.device == "cuda" else preload_settings()
    if shared:
        # Ray has given the cards to the ranks, and would not give them again.
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(shared)
    actor = ray.remote(
        num_cpus=0,
        num_gpus=0 if shared or spec.device == "cpu" else spec.rollout.parts,
        max_concurrency=10_000,
        concurrency_groups={"signs": 1},
        scheduling_strategy=home.place,
        runtime_env={"env_vars": environment},
    )(EngineActor)
    return actor.remote(os.getcwd(), shared)


def on_node(node_id: str) -> NodeAffinitySchedulingStrategy:
    """Return the Ray strategy that puts an actor or a task on a node, and nowhere else."""
    return NodeAffinitySchedulingStrategy(node_id, soft=False)


def call_on_node(
    node_id: str, function: Callable[[Sequence[int]], R], pids: Sequence[int]
) -> R | None:
    """Call a function with `pids` on a node; return its result, or None if the node is too slow."""
    if node_id == ray.get_runtime_context().get_node_id():
        return function(pids)
    task = ray.remote(num_cpus=0, max_retries=0, scheduling_strategy=on_node(node_id))(function)
    try:
        result: R = ray.get(task.remote(pids), timeout=_LOOK_SECONDS)
    except RayError:  # the node is gone, or too busy
        return None
    return result


def members(role: str, actors: Sequence[Any], timeout: float) -> list[Member]:
    """Wait until all actors have a process; return them, named by their role and number."""
    try:
        hosts: list[Host] = ray.get([actor.host.remote() for actor in actors], timeout=timeout)
    except GetTimeoutError as error:
        raise PlimsollError(
            f"Ray could not start the {role}s in {timeout:.0f} s (cluster.start_timeout), though "
            "their nodes and cards are there: the nodes are slow, or hang. `ray status` shows them"
        ) from error
    except RayError as error:
        raise PlimsollError(f"Ray could not start a process: {death_reason(str(error))}") from error
    numbered = enumerate(zip(actors, hosts, strict=True))
    return [Member(f"{role} {i}", actor, host) for i, (actor, host) in numbered]


def rank_members(role: str, actors: Sequence[Any], timeout: float) -> list[Member]:
    """Wait until all ranks have a process; return them, numbered node by node."""
    unordered = members(role, actors, timeout)
    order = order_by_node([member.host.node_id for member in unordered])
    return [replace(unordered[i], role=f"{role} {number}") for number, i in enumerate(order)]
