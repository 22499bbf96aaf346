"""What is planned of each process, held against the nodes and cards that a run has really got."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import groupby

from plimsoll.errors import DoesNotFit
from plimsoll.run.counting import gigabytes
from plimsoll.run.readings import Footprints, Reading


def refuse_smaller_nodes(
    predicted: Mapping[str, Footprints], readings: Mapping[str, Reading]
) -> None:
    """Stop before anything is loaded where a node or card cannot hold what is planned of the
    processes that are there.

    predicted: by process and phase. readings: of every process, under the same names.

    Raises:
        DoesNotFit: with each such node and card.
    """
    found = [*_nodes(predicted, readings), *_cards(predicted, readings)]
    if found:
        raise DoesNotFit(
            "\n  ".join(["the run does not fit the nodes that it was given", *found])
            + "\n  Look at `plimsoll plan --suggest` with cluster.hardware and "
            "cluster.host_memory as they are; --force starts a run that its plan refuses."
        )


def _nodes(predicted: Mapping[str, Footprints], readings: Mapping[str, Reading]) -> Iterator[str]:
    def node(name: str) -> str:
        return readings[name].host.node

    for where, group in groupby(sorted(readings, key=node), key=node):
        names = list(group)
        phases = {phase for name in names for phase in predicted.get(name, {})}
        held = {phase: [predicted.get(name, {}).get(phase) for name in names] for phase in phases}
        needs = (sum(one.host for one in own if one is not None) for own in held.values())
        need = max(needs, default=0)
        capacity = readings[names[0]].host.capacity
        if need > capacity:
            yield (
                f"node {where} has {gigabytes(capacity)} GB of host memory, and the plan has "
                f"{gigabytes(need)} GB for {', '.join(names)}, which are there"
            )


def _cards(predicted: Mapping[str, Footprints], readings: Mapping[str, Reading]) -> Iterator[str]:
    for name, reading in readings.items():
        peaks = predicted.get(name, {}).values()
        need = max((peak.device or 0 for peak in peaks), default=0)
        if reading.card is not None and need > reading.card.capacity:
            yield (
                f"the card of {name}, on node {reading.host.node}, has "
                f"{gigabytes(reading.card.capacity)} GB, and the plan has {gigabytes(need)} GB on "
                f"it"
            )
