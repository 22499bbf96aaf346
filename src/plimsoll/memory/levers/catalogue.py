"""The one list of memory levers, and what each of them may write in a run.

A new lever is a value in the file of what it turns, and a name in that file's list. Refusals, the
suggestions of `plimsoll plan --suggest`, the report of a run out of memory and the page of a plan
offer whatever is in LEVERS.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import plimsoll.engine.zero.levers as zero
import plimsoll.rollout.levers as rollout
import plimsoll.rollout.vllm_levers as vllm
from plimsoll.memory.levers import models, run
from plimsoll.memory.levers.changes import changes_between
from plimsoll.spec.dtypes import fast_dtype
from plimsoll.spec.roles import RoleName
from plimsoll.spec.run_spec import RunSpec
from plimsoll.timeline.levers import Lever, Move, Situation

LEVERS: tuple[Lever, ...] = (
    *run.LEVERS,
    *models.LEVERS,
    *zero.LEVERS,
    *rollout.LEVERS,
    *vllm.LEVERS,
)


def levers_by_rank() -> list[Lever]:
    """Return all levers, the cheapest first."""
    return sorted(LEVERS, key=lambda lever: lever.rank)


def moves_of(lever: Lever, at: Situation, role: RoleName | None = None) -> list[Move]:
    """Return what a lever may write in a run, the mildest first; what changes nothing is left out.

    Args:
        role: the one role whose keys are turned; None: all roles that the lever turns, together.
    """
    roles = [name for name in lever.roles(at.spec) if role in (None, name)]
    offers = [
        [in_section(at.spec, name, move) for move in lever.settings(replace(at, role=name))]
        for name in roles
    ]
    longest = max(map(len, offers), default=0)
    together = (_merged([o[min(step, len(o) - 1)] for o in offers if o]) for step in range(longest))
    return [move for move in together if changes_between(at.spec, move)]


def _merged(moves: Sequence[Move]) -> Move:
    return {key: value for move in moves for key, value in move.items()}


def in_section(spec: RunSpec[Any], role: RoleName, move: Move) -> Move:
    """Return a move with dotted keys of the config, and with what must stand beside them.

    Args:
        role: the role in whose section the keys are; "" for keys of the config.
    """
    if not role:
        return move
    made = {f"{spec.roles[role].key}.{key}": value for key, value in move.items()}
    if spec.roles[role].given or not changes_between(spec, made):
        return made
    return {**made, **_written_reference(spec)}


def _written_reference(spec: RunSpec[Any]) -> Mapping[str, Any]:
    """Return the model of a reference that the config leaves to its default, the actor's: it must
    stand beside any other key of the reference."""
    of_learning = {"gradient_checkpointing", "checkpoint_every", "activation_offload"}
    if spec.actor.model.dtype == fast_dtype(spec.cluster)[0]:  # as the default of its own is
        of_learning.add("dtype")
    fields = spec.actor.model.model_dump(exclude_defaults=True, exclude=of_learning)
    return {f"reference.model.{key}": value for key, value in fields.items()}
