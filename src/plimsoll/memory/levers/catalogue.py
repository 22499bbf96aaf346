"""The list of all memory levers, and the settings that each of them may write in a run.

A new lever is one more entry in `LEVERS` of the file for its settings. The levers of an engine are
in the `levers.py` of its folder. Refusals, the suggestions of `plimsoll plan --suggest`,
the report of a run out of memory and the page of a plan offer all LEVERS.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import plimsoll.sampler.levers as rollout
from plimsoll.config.engines import ROLLOUT_ENGINES, TRAINER_ENGINES, folder_value
from plimsoll.memory.levers import levers
from plimsoll.memory.levers.trials import changes_between
from plimsoll.resolve.decisions import fast_dtype
from plimsoll.resolve.roles import RoleName
from plimsoll.resolve.run_spec import RunSpec
from plimsoll.timeline.levers import Lever, Move, Situation

LEVERS: tuple[Lever, ...] = (
    *levers.LEVERS,
    *(lever for package in TRAINER_ENGINES for lever in folder_value(package, "levers", ())),
    *rollout.LEVERS,
    *(lever for package in ROLLOUT_ENGINES for lever in folder_value(package, "levers", ())),
)


def levers_by_rank() -> list[Lever]:
    """Return all levers, the cheapest first."""
    return sorted(LEVERS, key=lambda lever: lever.rank)


def moves_of(lever: Lever, at: Situation, role: RoleName | None = None) -> list[Move]:
    """Return the moves of a lever that change something in a run, the mildest first.

    Args:
        lever: the lever.
        at: the run on its machines.
        role: the one role whose keys are changed; None: all roles of the lever, together.
    """
    roles = [name for name in lever.roles(at.spec) if role in (None, name)]
    offers = [
        [in_section(at.spec, name, move) for move in lever.settings(replace(at, role=name))]
        for name in roles
    ]
    longest = max(map(len, offers), default=0)
    together = (
        merge_moves([o[min(step, len(o) - 1)] for o in offers if o]) for step in range(longest)
    )
    return [move for move in together if changes_between(at.spec, move)]


def merge_moves(moves: Iterable[Move]) -> Move:
    """Return several moves as one; if two set the same key, the later one holds."""
    return {key: value for move in moves for key, value in move.items()}


def in_section(spec: RunSpec[Any], role: RoleName, move: Move) -> Move:
    """Return a move with full dotted keys, and with the keys that must be set together with them.

    Args:
        spec: the run.
        role: the role in whose section the keys are; "" if they are full keys already.
        move: the move with keys of the section.
    """
    if not role:
        return move
    made = {f"{spec.roles[role].key}.{key}": value for key, value in move.items()}
    if spec.roles[role].given or not changes_between(spec, made):
        return made
    return {**made, **_reference_model(spec)}


def _reference_model(spec: RunSpec[Any]) -> Mapping[str, Any]:
    """Return the settings of the actor's model as keys of the reference's model.

    They are its defaults, but must be written as soon as the config sets another reference key.
    """
    left_out = {"gradient_checkpointing", "checkpoint_every", "activation_offload"}  # of learning
    if spec.actor.model.dtype == fast_dtype(spec.cluster)[0]:  # as it is decided for the reference
        left_out.add("dtype")
    fields = spec.written.actor.model.model_dump(exclude_defaults=True, exclude=left_out)
    return {f"reference.model.{key}": value for key, value in fields.items()}
