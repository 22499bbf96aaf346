"""The engine's memory."""

from __future__ import annotations

from collections.abc import Iterator

from plimsoll.sampler.price import EngineProcess, RolloutPrice
from plimsoll.timeline.items import Allocation, Item


def _contents(process: EngineProcess) -> Iterator[Allocation]:
    shape, element = process.sampler.shape, process.sampler.element
    formula, source = f"{element} bytes x {shape.parameters:,}", "sampler/parrot/engine.py"
    item = Item(
        "rollout", "rollout engines", "parrot weights", "device", "allocated",
        element * shape.parameters, formula, source,
    )  # fmt: skip
    yield Allocation(item, process.moments)


PRICE = RolloutPrice(
    contents=_contents,
    libraries="worker_process",
    plan=lambda site: iter(()),
    starts=lambda site, card_bytes: iter(()),
    shares=lambda site, card: iter(()),
    here=lambda site, cards, free_bytes: iter(()),
)
