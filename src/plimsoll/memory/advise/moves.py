"""What may be changed in a config so that it needs less memory, or, with room to spare, is faster.

A move is a few keys with new values that make sense together. It is tried, not proved: a search
keeps those after which less is lacking.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from plimsoll.config.engine import TrainedRole
from plimsoll.engine.zero.config import ZeroConfig
from plimsoll.engine.zero.rules import LOST_BELOW
from plimsoll.machine.hardware import Hardware
from plimsoll.memory.advise.engine_moves import engine_forms, smaller_engines
from plimsoll.memory.advise.states import free_cards, with_room
from plimsoll.memory.contents.stores import verdict_of
from plimsoll.memory.plan.plan import Plan
from plimsoll.memory.remedies import levers
from plimsoll.memory.remedies.changes import Move, changed, changes_between
from plimsoll.spec.run_spec import RunSpec

_CHUNK = 256
"""Rows of logits at once: fewer save little more."""


def faster_moves(spec: RunSpec[Any], hardware: Hardware) -> Iterator[Move]:
    """Those that need more memory, or more cards, and less time."""
    for factor in (2, 4):
        yield {"batch.micro_batch_tokens": factor * spec.workload.budget}
    for trained in _FASTER:
        yield _of_trained(spec, trained)
    yield _of_frozen(spec, levers.MODEL_OFF_HOST)
    if spec.cluster.where == "ray":
        yield filled(spec, hardware)


def filled(spec: RunSpec[Any], hardware: Hardware) -> Move:
    """Ranks on the cards that the run leaves free, as far as each gets a sequence (or pair); where
    the critic has ranks of its own, none."""
    cluster = spec.cluster
    ranks = min(cluster.ranks + free_cards(spec, hardware), spec.workload.units)
    more = cluster.critic_ranks is None and ranks > cluster.ranks
    return {"cluster.ranks": ranks} if more else {}


def grown(spec: RunSpec[Any], hardware: Hardware, steps: int) -> Move:
    """More nodes (fewer where steps is below 0) with ranks on all their cards; one for each group
    of ranks at a step."""
    cluster, cards = spec.cluster, len(hardware.nodes[0].cards)
    each = cards or max(1, cluster.ranks // cluster.nodes)
    if cluster.critic_ranks is None:
        ranks = cluster.ranks + free_cards(spec, hardware) + steps * each
        ranks = ranks if steps > 0 else min(ranks, cluster.ranks)
        return {"cluster.ranks": ranks, "cluster.nodes": cluster.nodes + steps}
    return {
        "cluster.ranks": cluster.ranks + steps * each,
        "cluster.critic_ranks": cluster.critic_ranks + steps * each,
        "cluster.nodes": cluster.nodes + 2 * steps,
    }


Moves = Callable[[Plan], Iterator[Move]]
"""What may be changed in one respect, of the config of a plan."""
TrainedMove = Callable[[TrainedRole], Move]


def _moments_in_8_bits(role: TrainedRole) -> Move:
    offloaded = role.settings_of(ZeroConfig).optimizer_offload == "cpu"
    return {} if offloaded else {"optimizer.kind": "adamw_8bit"}


def _narrow_gradients(role: TrainedRole) -> Move:
    wide = role.settings_of(ZeroConfig).stage > 0 and role.model.dtype == "bfloat16"
    return {"zero.gradient_dtype": "bfloat16"} if wide else {}


def _narrow_states(role: TrainedRole) -> Move:
    """Not where the learning rate is one whose updates bfloat16 would lose."""
    wide = role.settings_of(ZeroConfig).stage > 0 and role.model.dtype == "bfloat16"
    if not wide or role.optimizer.learning_rate < LOST_BELOW:
        return {}
    return {
        "zero.stage": max(2, role.settings_of(ZeroConfig).stage),
        "zero.state_dtype": "bfloat16",
    }


_DIVIDED: tuple[TrainedMove, ...] = (
    lambda role: {"zero.stage": max(2, role.settings_of(ZeroConfig).stage)},
    lambda _: levers.DIVIDED,
)
_RECOMPUTED: tuple[TrainedMove, ...] = (
    lambda _: {"model.gradient_checkpointing": "selective", **levers.EACH_LAYER_CHECKPOINTED},
    lambda _: {**levers.ALL_RECOMPUTED, "model.checkpoint_every": 2},
    lambda _: {**levers.ALL_RECOMPUTED, **levers.EACH_LAYER_CHECKPOINTED},
    lambda _: {**levers.ALL_RECOMPUTED, **levers.EACH_LAYER_CHECKPOINTED, **levers.INPUTS_ON_HOST},
)
_NARROW: tuple[TrainedMove, ...] = (_narrow_gradients, _narrow_states, _moments_in_8_bits)
_OFFLOADED: tuple[TrainedMove, ...] = (
    levers.optimizer_on_host,
    lambda _: levers.WEIGHTS_ON_HOST,
)
_ADAPTED: tuple[TrainedMove, ...] = (levers.with_adapter, levers.quantised)
_FASTER: tuple[TrainedMove, ...] = (
    lambda _: {"zero.optimizer_offload": "none"},
    lambda _: {"zero.parameter_offload": "none"},
    lambda _: {"model.activation_offload": "none"},
    lambda _: {
        "model.gradient_checkpointing": False,
        "model.checkpoint_every": 1,
        "model.activation_offload": "none",
    },
    lambda role: (
        {"model.gradient_checkpointing": "selective"}
        if role.model.gradient_checkpointing is True
        else {}
    ),
    lambda role: {
        "zero.stage": min(2, role.settings_of(ZeroConfig).stage),
        "zero.parameter_offload": "none",
    },
)
_FROZEN: tuple[Move, ...] = (
    levers.MODEL_ON_HOST,
    levers.MODEL_DIVIDED,
    {**levers.MODEL_DIVIDED, **levers.MODEL_ON_HOST},
    levers.MODEL_OFF_HOST,
)


def _of_trained(spec: RunSpec[Any], move: TrainedMove) -> Move:
    """The move made by all roles that learn."""
    return {
        f"{name}.{key}": value
        for name, role in spec.trained.items()
        for key, value in move(role).items()
    }


def _of_frozen(spec: RunSpec[Any], values: Move) -> Move:
    """The move made by all models that only score."""
    made = (levers.of_frozen(spec, name, values).items() for name in spec.frozen)
    return {key: value for items in made for key, value in items}


def _stored_reference(plan: Plan) -> Iterator[Move]:
    spec = plan.job.spec
    if spec.may_precompute and "reference" in spec.frozen:
        yield levers.PRECOMPUTED


def _fewer_checkpoints(plan: Plan) -> Iterator[Move]:
    if any(problem.code == "disk-space" for problem in plan.problems):
        yield {"run.keep_checkpoints": 1}


def _ranks(plan: Plan) -> Iterator[Move]:
    """On cards that are free, or no more than there are cards; fewer where they fill a host; of a
    run in one process, on all cards of its machine, or of two of them."""
    spec, hardware = plan.job.spec, plan.job.hardware
    if spec.cluster.where == "local":
        yield from _on_ray(spec, hardware)
        return
    yield filled(spec, hardware)
    if cards := spec.cluster.nodes * len(hardware.nodes[0].cards):
        yield _as_many_as_cards(spec, cards)
    if any(verdict_of(host, plan.band) != "fits" for host in plan.hosts):
        yield {"cluster.ranks": max(1, spec.cluster.ranks // 2)}


def _on_ray(spec: RunSpec[Any], hardware: Hardware) -> Iterator[Move]:
    on_ray: Move = {"cluster.where": "ray"}
    made = changed(spec, changes_between(spec, on_ray))
    if made is not None:
        more = (filled(made, hardware), grown(made, hardware, 1))
        yield from ({**on_ray, **move} for move in more if move)


def _as_many_as_cards(spec: RunSpec[Any], cards: int) -> Move:
    """No more ranks than there are cards, and engines that these have room for."""
    ranks = min(spec.cluster.ranks, cards)
    rollout = spec.engines
    if rollout is None:
        return {"cluster.ranks": ranks}
    parts, engines = rollout.parts, rollout.engines
    if rollout.placement == "shared":
        return {"cluster.ranks": ranks, "rollout.engines": max(1, min(engines, ranks // parts))}
    engines = max(1, min(engines, (cards - 1) // parts))
    return {
        "cluster.ranks": max(1, min(ranks, cards - engines * parts)),
        "rollout.engines": engines,
    }


def _critic_ranks(plan: Plan) -> Iterator[Move]:
    """The critic on ranks of its own; without cards, on a node of its own."""
    spec, cluster = plan.job.spec, plan.job.spec.cluster
    if "critic" not in spec.trained or cluster.critic_ranks or cluster.where == "local":
        return
    own: Move = {"cluster.critic_ranks": cluster.ranks}
    if _on_cards(plan):
        yield with_room(spec, own, plan.job.hardware)
    else:
        yield {**own, "cluster.nodes": cluster.nodes + 1}


def _nodes(plan: Plan) -> Iterator[Move]:
    """For all that have no card; one more, or two."""
    spec, hardware = plan.job.spec, plan.job.hardware
    if _on_cards(plan):
        yield with_room(spec, {}, hardware)
    if spec.cluster.where == "ray":
        yield from (grown(spec, hardware, steps) for steps in (1, 2))


def _on_cards(plan: Plan) -> bool:
    return plan.job.spec.cluster.where == "ray" and bool(plan.job.hardware.nodes[0].cards)


def _trained(*moves: TrainedMove) -> Moves:
    return lambda plan: (_of_trained(plan.job.spec, move) for move in moves)


def _frozen(*moves: Move) -> Moves:
    return lambda plan: (_of_frozen(plan.job.spec, move) for move in moves)


SAVING: tuple[Moves, ...] = (
    lambda plan: levers.smaller_micro_batches(plan.job.spec),
    _trained(lambda role: {"model.head_chunk": min(_CHUNK, role.model.head_chunk)}),
    _trained(*_DIVIDED),
    _trained(*_ADAPTED),
    engine_forms,
    smaller_engines,
    _frozen(*_FROZEN),
    _stored_reference,
    _trained(*_RECOMPUTED),
    _trained(*_NARROW),
    _trained(*_OFFLOADED),
    _fewer_checkpoints,
    _ranks,
    _critic_ranks,
    _nodes,
)
"""All that need less of something: of each, one is made, or none. What takes least time first."""


def saving_moves(plan: Plan) -> Iterator[Move]:
    """All of them, for the config of this plan."""
    return (move for moves in SAVING for move in moves(plan))
