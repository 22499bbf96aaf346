"""The matrix products of a step, against what cards can multiply."""

from __future__ import annotations

from plimsoll.machine.hardware import known_card
from plimsoll.memory.contents.contents import PlannedJob


def tokens_at_peak(job: PlannedJob) -> float | None:
    """Return the tokens a second of a run whose cards always compute at their bf16 peak.

    None without cards, or if the speed of a card is not known.

    A token takes 2 FLOPs a parameter in each forward and each product of a backward pass (Kaplan et
    al. 2020, section 2.1). Recomputation, and attention over other tokens, are left out. So the
    share of the peak that a run reaches is a lower bound if sequences are long.
    """
    slots = {process.slot for process in job.layout.processes}
    cards = [card for slot in slots if (card := job.card(slot)) is not None]
    if job.device != "cuda" or not cards or not all(known_card(card.name) for card in cards):
        return None
    return sum(card.bf16_flops for card in cards) / _token_flops(job)


def _token_flops(job: PlannedJob) -> float:
    """Return the FLOPs of a step for each of its tokens, in all roles and in engines.

    A role that learns does a forward, in the backward pass as much for the gradients of inputs, and
    as much again for the gradients of weights. A frozen base has no gradients of weights.
    """
    spec, products = job.spec, 0.0
    for name, trained in spec.trained.items():
        forwards = 3 if trained.adapter is None else 2
        work = spec.workload.epochs * forwards + spec.roles[name].scores
        products += job.shapes[name].active_parameters * work
    products += sum(job.shapes[name].active_parameters for name in spec.frozen)
    products += job.policy.active_parameters if job.sampler is not None else 0
    return 2 * products
