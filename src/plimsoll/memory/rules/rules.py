"""What a plan is refused for besides bytes: settings that cannot work on this hardware, with these
models, on the machine at hand. Each rule is a function of its own; docs/rules.md lists the codes.
"""

from __future__ import annotations

from collections.abc import Iterator

from plimsoll.config.problems import Problem
from plimsoll.machine.surroundings import Surroundings
from plimsoll.memory.contents.contents import Job
from plimsoll.memory.rules.cards import card_rules
from plimsoll.memory.rules.engines import engine_rules, free_share
from plimsoll.memory.rules.here import here_rules
from plimsoll.memory.rules.models import model_rules
from plimsoll.memory.rules.states import state_rules


def find_conflicts(job: Job, here: Surroundings | None) -> Iterator[Problem]:
    """here: None for a plan of other machines."""
    yield from model_rules(job)
    yield from engine_rules(job)
    yield from card_rules(job)
    yield from state_rules(job)
    if here is not None:
        yield from free_share(job, here.free_bytes)
        yield from here_rules(job.spec, here)
